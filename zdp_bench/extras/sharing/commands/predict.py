"""Run an exported model on an array in a .npy file, which is prepared like its training data. A
model trained with dataset=folder also takes a picture, scan or recording, and prepares it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from zdp_bench.cli.arguments import read_path

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
        help="the file with the inputs [n, ...]",
    )
    parser.add_argument(
        "--out", type=read_path, required=True, metavar="FILE", help="the file for outputs [n, ...]"
    )
    parser.add_argument(
        "--weights",
        type=read_path,
        metavar="FILE",
        help="the file with the public network's weights, if the run read them from a file",
    )


def run(options: argparse.Namespace) -> int:
    from zdp_bench.extras.sharing.loading import predict_file

    shape = predict_file(options.folder, options.inputs, options.out, options.weights)
    print(f"written: {options.out}, outputs {list(shape)}")
    return 0
