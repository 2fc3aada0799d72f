from pathlib import Path

import nibabel
import numpy as np

random = np.random.default_rng(0)
grid = np.indices((16, 16, 6)).transpose(1, 2, 3, 0)
Path("scans").mkdir()
lines = ["path,mask,patient"]
for patient in range(150):
    ball = ((grid - random.uniform((5, 5, 1), (10, 10, 4))) ** 2).sum(-1) < random.uniform(6, 20)
    scan = 100 * ball + random.normal(50, 20, ball.shape)
    names = [f"scans/p{patient:03}_{what}.nii.gz" for what in ("scan", "ball")]
    for name, voxels in zip(names, (scan, ball), strict=True):
        image = nibabel.Nifti1Image(voxels.astype(np.int16), np.diag([2, 2, 5, 1]))
        nibabel.save(image, name)
    lines.append(f"{names[0]},{names[1]},p{patient:03}")
Path("scans.csv").write_text("\n".join(lines))
