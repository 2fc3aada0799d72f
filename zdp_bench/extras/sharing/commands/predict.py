"""Run an exported model on the array of a .npy file, prepared like its training data. A model that
was trained with dataset=folder also reads a picture, scan or recording and prepares it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

GROUP = "share"
HELP = "compute an exported model's outputs for the inputs in a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="an exported model",
    )
    parser.add_argument(
        "inputs",
        type=Path,
        metavar="INPUTS",
        help="inputs [n, ...]",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the file for the outputs [n, ...]"
    )
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help="the public network's weights, if the run took them from a file",
    )


def run(options: argparse.Namespace) -> int:
    from zdp_bench.extras.sharing.loading import predict_file

    shape = predict_file(options.folder, options.inputs, options.out, options.weights)
    print(f"written: {options.out}, outputs {list(shape)}")
    return 0
