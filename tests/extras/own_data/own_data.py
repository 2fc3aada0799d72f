"""Small files of every kind that `dataset=folder` reads."""

import wave
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from zdp_bench.data import nifti
from zdp_bench.extras.own_data.folder import Folder

RATE = 100  # Hz of the recordings


def write_png(path: Path, level: int) -> Path:
    """A grey picture of 10 × 12 pixels, left half black."""
    pixels = np.full((10, 12), level, dtype=np.uint8)
    pixels[:, :6] = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def write_nifti(path: Path, level: int, shape: tuple[int, ...] = (12, 10, 4)) -> Path:
    """A volume whose left half is 0, and whose planes count up from `level`."""
    voxels = np.zeros(shape, dtype=np.int16)
    voxels[shape[0] // 2 :] = level + np.arange(shape[2])
    path.parent.mkdir(parents=True, exist_ok=True)
    nifti.write(path, voxels, (1.0, 1.0, 2.0))
    return path


def write_wav(path: Path, level: int, samples: int = 40, channels: int = 1) -> Path:
    """A wav file of one level, in units of 1/256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(np.full(samples * channels, 128 * level, dtype="<i2").tobytes())
    return path


def write_wfdb(path: Path, level: int, samples: int = 40) -> Path:
    """A record of two leads, I and V5, of level / 100 mV and its negative."""
    import wfdb

    path.parent.mkdir(parents=True, exist_ok=True)
    signal = np.full((samples, 2), level / 100) * [1, -1]
    form = {"fmt": ["16"] * 2, "adc_gain": [1000] * 2, "baseline": [0] * 2}
    names, units = ["I", "V5"], ["mV"] * 2
    wfdb.wrsamp(path.stem, RATE, units, names, signal, write_dir=str(path.parent), **form)
    return path


def write_table(path: Path, level: int, samples: int = 40) -> Path:
    """A CSV of one column, of level / 100."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("signal\n" + f"{level / 100}\n" * samples)
    return path


def write_array(path: Path, level: int, samples: int = 40) -> Path:
    """A `.npy` array [samples] of level / 100."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, np.full(samples, level / 100))
    return path


def write_dicom(path: Path, level: int, **changes: object) -> Path:
    """A grey image of 10 × 12 pixels, left half 0, stored with slope 2."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    path.parent.mkdir(parents=True, exist_ok=True)
    image, meta = Dataset(), FileMetaDataset()
    pixels = np.full((10, 12), level // 2, dtype=np.uint16)
    pixels[:, :6] = 0
    uid = generate_uid(entropy_srcs=[path.name])
    meta.TransferSyntaxUID, meta.MediaStorageSOPInstanceUID = ExplicitVRLittleEndian, uid
    meta.MediaStorageSOPClassUID = image.SOPClassUID = SecondaryCaptureImageStorage
    image.file_meta, image.SOPInstanceUID = meta, uid
    facts = {"Rows": 10, "Columns": 12, "SamplesPerPixel": 1, "BitsAllocated": 16, "BitsStored": 16}
    facts |= {"PhotometricInterpretation": "MONOCHROME2", "HighBit": 15, "PixelRepresentation": 0}
    facts |= {"RescaleSlope": 2, "RescaleIntercept": 0, "PixelData": pixels.tobytes(), **changes}
    for name, value in facts.items():
        setattr(image, name, value)
    image.save_as(path, enforce_file_format=True)
    return path


# kind -> (its ending, what writes a file, the options it needs)
KINDS = {
    "picture": (".png", write_png, {}),
    "image": (".dcm", write_dicom, {"window": [0, 255]}),
    "volume": (".nii.gz", write_nifti, {"window": [0, 255]}),
    "clip": (".wav", write_wav, {"length": 32, "rate": RATE}),
    "recording": (".hea", write_wfdb, {"length": 32, "rate": RATE}),
    "table": (".csv", write_table, {"length": 32}),
    "array": (".npy", write_array, {"length": 32}),
}


def folder(path: Path, kind: str = "picture", /, **options: Any) -> Folder:
    """`dataset=folder` of files of one kind, with examples of 8 × 8 pixels or 32 samples."""
    return Folder(**{"path": str(path), "size": 8, **KINDS[kind][2], **options})


def write_classes(folder: Path, kind: str, patients: int = 6) -> Path:
    """Two classes of patients with two files each; file n of patient p is 100·c + 10·p + n."""
    ending, write, _ = KINDS[kind]
    for label, name in enumerate(("sick", "well")):
        for patient in range(patients):
            for number in range(2):
                file = folder / name / f"{name[0]}{patient}" / f"{number}{ending}"
                write(file, 100 * label + 10 * patient + number)
    return folder


def write_masks(folder: Path, kind: str, patients: int = 10) -> Path:
    """Images of one file a patient, and masks of their right half."""
    ending, write, _ = KINDS[kind]
    for patient in range(patients):
        write(folder / "images" / f"p{patient}" / f"scan{ending}", 200 + 5 * patient)
        mask = folder / "masks" / f"p{patient}"
        if kind == "volume":
            write_nifti(mask / "scan.nii", 3)
        else:
            write_png(mask / "scan.png", 255)
    return folder
