"""Every way a file or a set can be broken ends in one sentence that names it, for every format.

One row a case: the data set, the first file of a pattern, what is done to it, and the sentence.
"""

import gzip
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import nibabel
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from tests.conftest import idx_bytes
from tests.data import test_fastmri
from tests.data.helpers import (
    EMPTY,
    WEB_PAGE,
    Spoil,
    assert_refused,
    bomb,
    change,
    copy_folder,
    dataset,
    edit,
    keep,
    move,
    overwrite,
    put,
    shift,
)
from tests.data.test_digests import CASES as SETS
from tests.data.test_fastmri import arrays
from zdp_bench.data import nifti, roahd
from zdp_bench.data.cifar10 import RECORD
from zdp_bench.data.mnist import read_idx

# ------------------------------------------------------------------------- what is done to a file


def rename(suffix: str) -> Spoil:
    return lambda path: path.rename(path.with_name(path.name.split(".")[0] + suffix))


def beside(name: str, content: bytes = b"x") -> Spoil:
    return lambda path: path.with_name(name).write_bytes(content)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def empty(path: Path) -> None:
    remove(path)
    path.parent.mkdir()


def remove(path: Path) -> None:
    shutil.rmtree(path.parent)


def copy_to(folder: str) -> Spoil:
    return lambda path: shutil.copy(path, path.parents[1] / folder)


def lead_out(path: Path) -> None:
    outside = path.parents[3] / f"outside{path.suffix}"
    shutil.move(path, outside)
    path.symlink_to(outside)


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def film(size: tuple[int, int], kind: str = "JPEG") -> Spoil:
    return lambda path: Image.new("L", size).save(path, format=kind)


def wav(data: np.ndarray | None = None, rate: int = 16_000, subtype: str = "PCM_16") -> Spoil:
    samples = np.zeros(16_000) if data is None else data
    return lambda path: soundfile.write(path, samples, rate, subtype=subtype)


def drop_lead(header: Path) -> None:
    lines = header.read_text().replace("S0002 12", "S0002 11").splitlines()
    header.write_text("\n".join(line for line in lines if not line.endswith("V6")))


def mark_missing(signal: Path) -> None:
    """Make every sample −32768, WFDB's mark of a missing one, with the sum of 0 in the header."""
    change(lambda whole: whole[:24] + b"\x00\x80" * (len(whole) // 2 - 12))(signal)
    header = signal.with_suffix(".hea")
    header.write_text(re.sub(r"-?\d+ 0 (\w+)\n", r"0 0 \1\n", header.read_text()))


def again(header: Path) -> None:
    (header.parent / "again").mkdir()
    shutil.copy(header, header.parent / "again")


def h5(**changed: Any) -> Spoil:
    """Write a volume of fastMRI anew; None leaves a data set out."""
    return lambda path: test_fastmri.write(path, 0, **changed)


KSPACE = arrays(0)["kspace"]
ELSEWHERE = h5py.ExternalLink("outside.h5", "/kspace")


def store_externally(path: Path) -> None:
    """Keep the k-space of a file in one outside of the data root."""
    raw = path.parents[3] / "outside.raw"
    raw.write_bytes(KSPACE.tobytes())
    test_fastmri.write(path, 0, kspace=None)
    with h5py.File(path, "a") as file:
        place = [(str(raw), 0, h5py.h5f.UNLIMITED)]
        file.create_dataset("kspace", KSPACE.shape, KSPACE.dtype, external=place)


def chunk_widely(path: Path) -> None:
    test_fastmri.write(path, 0, kspace=None, reconstruction_esc=None)
    with h5py.File(path, "a") as file:
        for name, kind in (("kspace", np.complex64), ("reconstruction_esc", np.float32)):
            file.create_dataset(name, (64, 4096, 4096), kind, chunks=(16, 4096, 4096))


VOXELS = np.arange(24, dtype=np.int16).reshape(2, 3, 4)


def volume(voxels: np.ndarray, affine: np.ndarray | None = None) -> Spoil:
    made = nibabel.Nifti1Image(voxels, np.eye(4) if affine is None else affine)
    return lambda path: nibabel.save(made, path)


def announce(*shape: int) -> Spoil:
    """A NIfTI-2 file whose header has these 64-bit sizes, whatever voxels there are."""

    def write(path: Path) -> None:
        nibabel.Nifti2Image(VOXELS, np.eye(4)).to_filename(path)
        overwrite(16, struct.pack("<4q", 3, *shape))(path)

    return write


def stored_gzip(how: Callable[[bytes], bytes]) -> Spoil:
    """Stored blocks unpack whatever their bytes are: only the checksum behind the voxels tells."""
    plain = nibabel.Nifti1Image(np.zeros((40, 40, 40), np.int16), np.eye(4)).to_bytes()
    return put(how(gzip.compress(plain, compresslevel=0)))


FLIPPED = stored_gzip(lambda whole: whole[:-12] + b"\1" + whole[-11:])


def go_on(whole: bytes) -> bytes:
    """A stream of much more than its voxels, in some kB."""
    return gzip.compress(gzip.decompress(whole) + bytes(2**26 + 2**20), compresslevel=1)


def voxels_of(path: Path) -> np.ndarray:
    return np.asarray(nibabel.load(path).dataobj)  # type: ignore[attr-defined]


def revolume(how: Callable[[np.ndarray], np.ndarray]) -> Spoil:
    return lambda path: volume(how(voxels_of(path)))(path)


def halve(mask: Path) -> None:
    nifti.write(mask, np.full((40, 40, 12), 0.5, np.float32), (5.0, 4.0, 10.0))


def leave_two(image: Path) -> None:
    for kind in ("imagesTr", "labelsTr"):
        for path in nifti.paths_of(image.parents[1] / kind)[2:]:
            path.unlink()


IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
IDX = idx_bytes(IMAGES)


def idx(*shape: int, data: int) -> bytes:
    """The header of an idx file of images, and so many zeros."""
    return gzip.compress(b"\0\0\x08\x03" + struct.pack(">3I", *shape) + bytes(data))


def labels(values: np.ndarray) -> Spoil:
    return put(gzip.compress(idx_bytes(values)))


# ---------------------------------------------------------------------------------------- the rows

FILM, CLIP = "chest_xray/train/NORMAL/*", "SpeechCommands/speech_commands_v0.02/no/*"
LESION = "ham10000/HAM10000_images_part_1/*"
LESIONS = "ham10000/HAM10000_metadata.csv"
STAY, DIED = "physionet2012/set-a/*", "physionet2012/Outcomes-a.txt"
WFDB = "CPSC2018/cinc2020_wfdb/S0002"
H5 = "fastMRI/singlecoil_train/file1000000.h5"
HEADS, LIVER = "Task01_BrainTumour/imagesTr/BRATS_001.nii.gz", "Task03_Liver/imagesTr/*"
LIVER_MASK = "Task03_Liver/labelsTr/*"
HIPPOCAMPUS = "Task04_Hippocampus/imagesTr/h_1.nii.gz"
TRAIN, TRAIN_LABELS = "MNIST/raw/train-images*", "MNIST/raw/train-labels*"
BATCH = "cifar-10-batches-bin/data_batch_4.bin"
CUT = "cannot be read"

CASES: list[tuple[str, str, Spoil, str]] = [
    *(("chest_xray", FILM, how, CUT) for how in (EMPTY, keep(300))),
    ("chest_xray", FILM, film((20, 20), "PNG"), CUT),
    ("chest_xray", FILM, bomb, "20,000×20,000 pixels|DecompressionBombError"),
    ("chest_xray", FILM, lead_out, "a link that leads out of"),
    ("chest_xray", FILM, beside("readme.txt"), "readme.txt: is not a JPEG file"),
    ("chest_xray", FILM, make_folder, "not a file"),
    ("chest_xray", FILM, lambda p: p.rename(p.with_name("scan7.jpeg")), "identify the patient"),
    *(("chest_xray", FILM, how, "is missing") for how in (empty, remove)),
    # HAM10000
    *(("ham10000", LESION, how, CUT) for how in (EMPTY, keep(300))),
    ("ham10000", LESION, film((20, 20), "PNG"), CUT),
    ("ham10000", LESION, bomb, "20,000×20,000 pixels|DecompressionBombError"),
    ("ham10000", LESION, lead_out, "a link that leads out of"),
    ("ham10000", LESION, Path.unlink, "ISIC_0024306.jpg is in neither"),
    (
        "ham10000",
        LESION,
        copy_to("HAM10000_images_part_2"),
        "is the same picture as HAM10000_images_part_1",
    ),
    ("ham10000", LESION, beside("ISIC_1234567.jpg"), "is not in HAM10000_metadata.csv"),
    ("ham10000", LESION, beside("readme.txt"), "readme.txt: is not named as a picture"),
    ("ham10000", LESIONS, Path.unlink, "HAM10000_metadata.csv: is missing"),
    ("ham10000", LESIONS, EMPTY, "no column lesion_id, image_id, dx"),
    ("ham10000", LESIONS, edit("dx,", "diagnosis,"), "no column dx"),
    (
        "ham10000",
        LESIONS,
        edit("lesion_id,image_id,dx,dx_type", "lesion_id,image_id,dx,dx"),
        "dx, or",
    ),
    ("ham10000", LESIONS, edit(",mel,", ",melanoma,"), "diagnosis 'melanoma' in line 2, none of"),
    ("ham10000", LESIONS, edit("HAM_0000000,", ","), "has no lesion_id in line 2"),
    ("ham10000", LESIONS, edit("ISIC_0024306", "../../secret"), "has no image_id in line 2"),
    ("ham10000", LESIONS, edit("ISIC_0024307", "ISIC_0024306"), "ISIC_0024306 a second time"),
    ("ham10000", LESIONS, edit("HAM_0000000", "unknown"), "stands for a missing one"),
    ("ham10000", LESIONS, edit("histo", "hi\0sto"), "control character"),
    ("ham10000", LESIONS, edit("histo", '"histo'), CUT),
    ("ham10000", LESIONS, edit("back", "back,x"), "more cells than columns in line 2"),
    # PhysioNet's Challenge 2012
    *(("physionet2012", STAY, how, "does not begin with") for how in (EMPTY, WEB_PAGE)),
    ("physionet2012", STAY, put(b"\xff\xfe"), "is not UTF-8"),
    ("physionet2012", STAY, put(b"x" * 2**19), "is larger than"),
    ("physionet2012", STAY, Path.unlink, "132000.txt: is missing, but Outcomes-a.txt has"),
    ("physionet2012", STAY, rename(".csv"), "is not the record of a patient in Outcomes-a.txt"),
    ("physionet2012", STAY, beside("7.txt"), "7.txt: is not the record of a patient"),
    ("physionet2012", STAY, lead_out, "a link that leads out of"),
    ("physionet2012", STAY, make_folder, "file"),
    (
        "physionet2012",
        STAY,
        edit("RecordID,132000", "RecordID,132001"),
        "RecordID 132001 in line 2",
    ),
    ("physionet2012", STAY, edit("00:00,RecordID,132000\n", ""), "not have exactly one RecordID"),
    ("physionet2012", STAY, edit("Weight,80", "Weight,80,kg"), "has 4 cells in line"),
    ("physionet2012", STAY, edit("00:00,Weight", "49:00,Weight"), "has the time '49:00'"),
    ("physionet2012", STAY, edit("00:00,Weight", "noon,Weight"), "has the time 'noon'"),
    ("physionet2012", STAY, edit("Weight,80", "Waist,80"), "has the unknown variable 'Waist'"),
    *(
        ("physionet2012", STAY, edit("Weight,80", f"Weight,{value}"), f"has the value '{value}'")
        for value in ("", "nan", "inf", "1e300", "heavy")
    ),
    ("physionet2012", STAY, edit("ICUType,", "ICUType,7"), "a value of ICUType other than 1"),
    ("physionet2012", STAY, edit("Gender,", "Gender,3"), "a value of Gender other than 0"),
    *(
        ("physionet2012", STAY, edit("00:00,Weight", f"01:00,{code}\n00:00,Weight"), "other than")
        for code in ("Gender,7", "Gender,0.5", "ICUType,5", "ICUType,0")
    ),
    ("physionet2012", STAY, edit("Weight,80", "Weight,8\x000"), "control character"),
    ("physionet2012", DIED, Path.unlink, "Outcomes-a.txt: is missing"),
    ("physionet2012", DIED, EMPTY, "does not begin with RecordID"),
    ("physionet2012", DIED, edit("Survival,", ""), "does not begin with RecordID"),
    ("physionet2012", DIED, edit("132000,10,5,7,-1,", "132000,10,5,7,"), "has 5 cells in line 2"),
    ("physionet2012", DIED, edit("-1,1", "-1,2"), "has the outcome '2' in line 2"),
    ("physionet2012", DIED, edit("132001,", "132000,"), "names patient 132000 a second time"),
    ("physionet2012", DIED, edit("132000,", "../x,"), "has no RecordID in line 2"),
    ("physionet2012", STAY, remove, "set-a: is missing"),
    # PhysioNet's form of CPSC 2018
    ("cpsc2018", f"{WFDB}.mat", keep(-100), "bytes where its header announces"),
    ("cpsc2018", f"{WFDB}.mat", Path.unlink, "S0002.mat: is missing"),
    ("cpsc2018", f"{WFDB}.mat", WEB_PAGE, "1,076 bytes where its header announces"),
    ("cpsc2018", f"{WFDB}.mat", mark_missing, "not finite"),
    ("cpsc2018", f"{WFDB}.hea", EMPTY, CUT),
    ("cpsc2018", f"{WFDB}.hea", Path.unlink, "S0002.mat: has no header"),
    ("cpsc2018", f"{WFDB}.hea", edit("S0002 12 500", "S0002 12 250"), "250 Hz where 500 Hz"),
    ("cpsc2018", f"{WFDB}.hea", edit("500 1000", "500 99999999999"), "s 99,999,999,999 samples"),
    ("cpsc2018", f"{WFDB}.hea", edit("500 1000", "500 900"), "header's checksum"),
    ("cpsc2018", f"{WFDB}.hea", drop_lead, "11 leads where at least 12"),
    ("cpsc2018", f"{WFDB}.hea", edit("#Dx", "#Rx"), "no diagnosis"),
    ("cpsc2018", f"{WFDB}.hea", edit("1000/mV", "10\x0000/mV"), "control character .* in line 2"),
    ("cpsc2018", f"{WFDB}.hea", edit("#Dx", "#\0Dx"), "control character"),
    ("cpsc2018", f"{WFDB}.hea", edit("Normal", "Nor\u2028mal"), "has diagnosis"),
    (
        "roahd",
        f"{roahd.FOLDER}/RL0001.hea",
        edit("1000/mV", "10\x0000/mV"),
        "control character .* in line 2",
    ),
    ("cpsc2018", f"{WFDB}.hea", edit("mat 16+24", "mat 212+24"), "header's checksum"),
    ("cpsc2018", f"{WFDB}.hea", edit("S0002.mat", "../S0002.mat"), f"{CUT}|missing beside it"),
    ("cpsc2018", f"{WFDB}.hea", edit("S0002.mat", "S0004.mat"), "names S0004.mat where"),
    ("cpsc2018", f"{WFDB}.hea", put(b"S0002/2 12 500 1000\nA 500\nB 500\n"), "several segments"),
    ("cpsc2018", f"{WFDB}.hea", lead_out, "a link that leads out"),
    ("cpsc2018", f"{WFDB}.hea", edit("Normal", "55827005"), "'55827005'.* none of Normal"),
    ("cpsc2018", f"{WFDB}.hea", edit("Normal", "426783006"), "sinus rhythm, which means Normal in"),
    ("roahd", f"{roahd.FOLDER}/RL0001.hea", edit("164909002", "426783006"), "RL0001.hea: has diag"),
    ("cpsc2018", f"{WFDB}.hea", again, "a recording named S0002 occurs twice"),
    # SpeechCommands
    *(("speech_commands", CLIP, how, CUT) for how in (EMPTY, keep(20))),
    ("speech_commands", CLIP, keep(9044), "32000 bytes of samples, but has 9000"),
    ("speech_commands", CLIP, wav(np.zeros(0)), "announces 0 samples"),
    ("speech_commands", CLIP, wav(np.zeros((16_000, 2))), "has 2 channels at 16000 Hz"),
    ("speech_commands", CLIP, wav(rate=8000), "1 channels at 8000 Hz"),
    ("speech_commands", CLIP, wav(np.full(9, np.nan), subtype="FLOAT"), "not finite"),
    ("speech_commands", CLIP, wav(np.zeros(176_000)), "announces 176,000 samples"),
    ("speech_commands", CLIP, overwrite(40, b"\xfe\xff\xff\xff"), "announces 4294967294 bytes"),
    ("speech_commands", CLIP, loop, "a link to itself"),
    ("speech_commands", CLIP, lead_out, "a link that leads out"),
    ("speech_commands", CLIP, make_folder, "not a file"),
    ("speech_commands", CLIP, rename(".mp3"), "is not a .wav file"),
    ("speech_commands", CLIP, lambda p: shutil.copy(p, f"{p}.wav"), "is the same clip as"),
    # fastMRI
    *(("fastmri", H5, how, CUT) for how in (EMPTY, keep(-300))),
    ("fastmri", H5, h5(kspace=KSPACE.real), "of float32 and .*, but complex and real"),
    ("fastmri", H5, h5(kspace=KSPACE[None]), "has no data set .reconstruction_rss"),
    ("fastmri", H5, h5(**arrays(0, slices=0)), "axes must have 1 to 4,096"),
    ("fastmri", H5, h5(reconstruction_esc=None), "has no data set 'reconstruction_esc'"),
    ("fastmri", H5, h5(kspace=h5py.SoftLink("/reconstruction_esc")), "'kspace' that is a link"),
    ("fastmri", H5, h5(kspace=ELSEWHERE), "'kspace' that is a link"),
    ("fastmri", H5, store_externally, "virtual or stored externally"),
    ("fastmri", H5, chunk_widely, "2,147,483,648 bytes"),
    ("fastmri", H5, rename(".hdf"), "is not an .h5 file"),
    ("fastmri", H5, copy_to("singlecoil_val"), "is in both"),
    ("fastmri", H5, lead_out, "a link that leads out of"),
    # a NIfTI file, by its reader
    ("nifti", "v.nii", Path.unlink, "is missing"),
    ("nifti", "v.nii", make_folder, "not a file"),
    *(("nifti", "v.nii", how, CUT) for how in (EMPTY, WEB_PAGE)),
    ("nifti", "v.nii", keep(370), "it is truncated"),
    ("nifti", "v.nii", volume(np.zeros((4, 4))), "three dimensions"),
    ("nifti", "v.nii", volume(np.full((2, 2, 2), np.nan)), "not finite"),
    ("nifti", "v.nii", overwrite(296, bytes(16)), "affine"),  # the second row of its sform
    ("nifti", "v.nii", volume(VOXELS.astype(np.complex64)), "complex64, not real numbers"),
    ("nifti", "v.nii", announce(2**32, 2**32, 1), "that are supported"),  # wraps to 0
    ("nifti", "v.nii", announce(2**13, 2**13 + 1, 1), "8,193×8,192 pixels; 1 to 67,108,864"),
    ("nifti", "v.nii", announce(800, 800, 840), "that are supported"),
    ("nifti", "v.nii", announce(800, 800, 800), "announces 1,024,000,000 bytes"),
    ("nifti", "v.nii.gz", change(lambda whole: whole[: len(whole) // 2]), CUT),
    ("nifti", "v.nii.gz", FLIPPED, "BadGzipFile"),
    ("nifti", "v.nii.gz", stored_gzip(lambda whole: whole[:-8]), "EOFError"),
    ("nifti", "v.nii.gz", change(go_on), "has data after its voxels"),
    *(("nifti labels", "v.nii", volume(VOXELS + x), "from 0 to 255") for x in (0.5, -1.0, 300.0)),
    ("nifti labels", "v.nii", volume(VOXELS + np.nan), "not finite"),
    ("nifti labels", "v.nii.gz", FLIPPED, "BadGzipFile"),
    # volumes of four channels
    ("mri_sequences", HEADS, keep(-200), CUT),
    ("mri_sequences", HEADS, revolume(lambda v: v.astype(np.complex64)), "not real numbers"),
    ("mri_sequences", HEADS, revolume(lambda v: v[..., :3]), "three dimensions and 4 channels"),
    ("mri_sequences", HEADS, revolume(lambda v: np.where(v > 400, np.nan, v)), "not finite"),
    ("mri_sequences", HEADS, rename(".mgz"), "is not a .nii or .nii.gz"),
    ("mri_sequences", HEADS, lambda p: volume(voxels_of(p))(p.with_suffix("")), "is the same vol"),
    ("mri_sequences", HEADS, lead_out, "a link that leads out of"),
    ("mri_sequences", HEADS, copy_to("imagesTs"), "same patient is in imagesTr"),
    # volumes of one
    ("kspace_from_volumes", HIPPOCAMPUS, keep(-200), CUT),
    ("kspace_from_volumes", HIPPOCAMPUS, revolume(lambda v: v[..., None].repeat(2, 3)), "no chan"),
    ("kspace_from_volumes", HIPPOCAMPUS, remove, "is missing"),
    ("kspace_from_volumes", HIPPOCAMPUS, empty, "contains no .nii"),
    # labelled volumes
    ("msd", LIVER, EMPTY, CUT),
    ("msd", LIVER, keep(5000), CUT),
    ("msd", LIVER, lead_out, "leads out of"),
    ("msd", LIVER_MASK, volume(np.zeros((4, 4, 4), np.uint8)), r"\[4, 4, 4\] voxels, but its"),
    (
        "msd",
        LIVER_MASK,
        move(lambda affine: shift(affine, 0, 30.0)),
        r"lies 30 mm beside its image",
    ),
    ("msd", LIVER_MASK, revolume(lambda v: v), r"voxels of \(1\.0, 1\.0, 1\.0\) mm"),
    ("msd", LIVER_MASK, halve, "whole numbers"),
    ("msd", LIVER_MASK, Path.unlink, "the volume 'liver_0.*missing"),
    ("msd", LIVER, remove, "is missing, but the other"),
    ("msd", LIVER, leave_two, "at least 3"),
    # idx, by its reader
    ("idx", "a.gz", put(gzip.compress(IDX)[:-12]), "EOFError"),
    ("idx", "a.gz", WEB_PAGE, "BadGzipFile"),
    ("idx", "a.gz", put(gzip.compress(b"")), "starts with 0x where 0x00000803"),
    ("idx", "a.gz", put(gzip.compress(bytes(range(200)))), "starts with 0x00010203"),
    ("idx", "a.gz", put(idx(1, 1, 1, data=10**6)), "announces 1 bytes .* but more are there"),
    ("idx", "a.gz", put(idx(2**16, 2**14, 2, data=10**6)), "at most 1,073,741,824 are read"),
    ("idx", "a", EMPTY, "starts with 0x where"),
    ("idx", "a", put(b"\0\0\x0d\x03" + IDX[4:]), "starts with 0x00000d03"),
    ("idx", "a", put(IDX[:10]), "ends inside its header"),
    ("idx", "a", put(IDX + b"x"), "announces 24 bytes .* but more are there"),
    ("idx", "a", make_folder, "not a file"),
    ("mnist", TRAIN, keep(-100), "EOFError"),
    ("mnist", TRAIN, labels(np.zeros((200, 32, 32))), "28×28 pixels, and .* images 32×32"),
    ("mnist", TRAIN, labels(np.zeros((200, 0, 28))), "holds images of 0×28 pixels"),
    ("phasemnist", TRAIN, labels(np.zeros((200, 32, 32))), "28×28 pixels, and .* images 32×32"),
    ("mnist", TRAIN_LABELS, labels(np.zeros(7)), "7 labels, and .* 200 images"),
    ("mnist", TRAIN_LABELS, labels(np.full(200, 11)), "holds label 11"),
    # CIFAR-10
    ("cifar10", BATCH, Path.unlink, "is missing"),
    ("cifar10", BATCH, make_folder, "not a file"),
    ("cifar10", BATCH, EMPTY, "holds 0 bytes"),
    ("cifar10", BATCH, keep(-1), "holds 61,459 bytes, no whole number of 3073-byte images"),
    ("cifar10", BATCH, overwrite(3 * RECORD, b"\x0a"), r"labels \[10\]; classes are 0 to 9"),
    ("cifar10", BATCH, lambda path: os.truncate(path, 2**32), "has 4,294,967,296 bytes"),
]
MAKE: dict[str, Spoil] = {
    "fastmri": test_fastmri.write_set,
    "idx": lambda root: [(root / name).write_bytes(IDX) for name in ("a", "a.gz")],
    "nifti": lambda root: [volume(VOXELS)(root / name) for name in ("v.nii", "v.nii.gz")],
}
MAKE["nifti labels"] = MAKE["nifti"]
READERS: dict[str, Callable[[Path], object]] = {
    "idx": lambda path: read_idx(path, 3),
    "nifti": nifti.read,
    "nifti labels": nifti.read_labels,
}


@pytest.mark.parametrize("name", ["chest_xray", "cpsc2018", "msd", "speech_commands", "own"])
def test_a_name_that_is_not_utf_8_is_named(name: str, small_root: Path, tmp_path: Path) -> None:
    """It could be neither digested nor written."""
    made, options = SETS["folder picture" if name == "own" else name]
    if callable(made):
        made(tmp_path)
        options = options | {"path": str(tmp_path / "own")}
    else:
        copy_folder(small_root, tmp_path, made[0])
    suffixes = (".jpeg", ".hea", ".nii.gz", ".wav", ".png")
    path = max(path for path in tmp_path.rglob("*") if path.name.endswith(suffixes))
    path.rename(path.with_name(os.fsdecode(b"M\xfcller") + "".join(path.suffixes)))
    load = dataset("folder" if name == "own" else name, **options).load
    assert_refused(lambda: load(tmp_path), "M\\xfcller", "its name is not UTF-8; rename it")


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda n: f"{CASES[n][0]}-{n}")
def test_what_is_broken_is_refused_by_name(case: int, small_root: Path, tmp_path: Path) -> None:
    name, pattern, spoil, says = CASES[case]
    root = tmp_path / "a" / "root"  # a place for what lies outside of it
    root.mkdir(parents=True)
    if name in MAKE:
        MAKE[name](root)
    else:
        copy_folder(small_root, root, Path(pattern).parts[0])
    path = min(root.glob(pattern if Path(pattern).suffix or "*" in pattern else f"{pattern}*"))
    spoil(path)

    def load(**more: Any) -> str:
        if name in READERS:
            return str(READERS[name](path))
        splits = dataset(name, **SETS[name][1] | more).load(root)
        for part in (splits.train, splits.test):
            part.batch(torch.arange(len(part)))
        return splits.notes

    assert_refused(load, "" if name in READERS else path.relative_to(root).parts[0], says)
    assert not list((root / "derived").glob("kspace-*"))  # nothing half made is left in place
    if name == "cpsc2018" and not re.search("leads out|twice", says):
        assert load(bad_examples="skip").endswith("1 unusable skipped")
