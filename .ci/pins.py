"""Write the hashes of what the image installs: `requirements-torch.txt`, `requirements-image.txt`.

The versions are those of `constraints.txt`. torch and the libraries of CUDA have a file of their
own, since PyTorch's CPU builds replace them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ("medical", "audio", "search")
OF_TORCH = re.compile(r"torch|triton|nvidia-|cuda-")


def main() -> None:
    """Resolve the packages, and write both files."""
    words = ["-m", "uv", "pip", "compile", "pyproject.toml", "-c", "constraints.txt"]
    words += ["--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
    words += ["--no-emit-index-url", "--no-emit-find-links", "--python-version", "3.11"]
    for extra in EXTRAS:
        words += ["--extra", extra]
    resolved = subprocess.run(
        [sys.executable, *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    packages = re.split(r"\n(?=\w)", resolved.strip())
    files: dict[str, list[str]] = {"torch": [], "image": []}
    for package in packages:
        files["torch" if OF_TORCH.match(package) else "image"].append(package)
    for name, lines in files.items():
        (ROOT / f"requirements-{name}.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
