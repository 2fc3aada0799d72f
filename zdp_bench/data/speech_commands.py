"""SpeechCommands as complex spectrograms (Ziller et al. 2021, 5.3 and A.2.3), from its wav folders.

A.2.3 uses TensorFlow's short-time Fourier transform with frames of 255 samples every 128. `tf.signal.stft` then takes the
next power of two, 256, as FFT length, a periodic Hann window of the frame's length, no centring and no padding at the end:
1 + (16000 − 255) // 128 = 124 frames of 129 bins.

The paper names ten words, counts 8,000 clips where ten times 2,000 would be 20,000, and gives its network 8 outputs. Here the
words and the clips per word are keys, and the network has one output a word.

Five keys make a smaller or an easier task of it, for variants of ours; each works on one clip alone, so it costs no privacy:
`frame_step`, `bins` (the lowest are kept), `scale` (log: |z| becomes log(1 + 100·|z|)/log 101; log_modulus: that without the
phase), `align` (a clip is turned round in time until its energy is centred) and `grid` (means over so many frames × bins).
"""

from __future__ import annotations

import hashlib
import math
import wave
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from zdp_bench.data import DatasetInfo, Examples, Provenance, Splits
from zdp_bench.data.cache import kept
from zdp_bench.data.files import holds_any, sha256
from zdp_bench.errors import UserError, require, suggestion
from zdp_bench.registry import register

RATE = 16_000  # Hz; a clip is one second
CLIP = 16_000  # samples
FRAME, STEP, FFT = 255, 128, 256
BINS = FFT // 2 + 1
LOG_GAIN = 100.0
LARGEST = 10 * CLIP  # samples; a file that announces more is no clip of this set
FOLDER = Path("SpeechCommands") / "speech_commands_v0.02"


Scale = Literal["linear", "log", "log_modulus"]


def frames(step: int) -> int:
    """How many frames a clip has: 124 every 128 samples."""
    return 1 + (CLIP - FRAME) // step


def stft(waves: Tensor, step: int = STEP) -> Tensor:
    """tf.signal.stft(waves, 255, step): float [B, 16000] -> complex64 [B, frames, 129].

    torch's `stft` frames by the FFT length, one sample more, whose weight is 0: a zero behind the clip is not seen.
    """
    waves = torch.nn.functional.pad(waves, (0, FFT - FRAME))
    window = torch.nn.functional.pad(torch.hann_window(FRAME, periodic=True), (0, FFT - FRAME))
    return torch.stft(waves, FFT, step, FFT, window, center=False, return_complex=True).transpose(
        1, 2
    )


def speaker(clip: Path) -> str:
    """'0a7c2a8d_nohash_0.wav' -> '0a7c2a8d': the person, as the release's README has it."""
    return clip.name.split("_nohash_")[0].split("_")[-1]


def read_clip(path: Path) -> np.ndarray:
    """One clip as float32 [16000] in [-1, 1), padded with zeros at the end or cut.

    By Python's own `wave`: libsndfile shortens, without a word, what a cut file announces.

    Raises:
        UserError: no readable wav file of 16-bit samples, another rate, several channels, no samples, or fewer than announced.
    """
    try:
        with wave.open(str(path)) as file:
            rate, channels, width, announced = (
                file.getframerate(),
                file.getnchannels(),
                file.getsampwidth(),
                file.getnframes(),
            )
            if (rate, channels, width) != (RATE, 1, 2):
                has = f"has {channels} channels of {8 * width}-bit samples at {rate} Hz"
                raise UserError(f"{path}: {has}; one channel of 16 bits at {RATE} Hz was expected.")
            if not 0 < announced <= LARGEST:
                raise UserError(
                    f"{path}: announces {announced:,} samples where about {CLIP:,} were expected."
                )
            samples = np.frombuffer(file.readframes(announced), dtype="<i2")
    except (wave.Error, EOFError, ValueError) as error:  # of the file's header, or half a sample
        raise UserError(
            f"{path}: is not a readable wav file of 16-bit samples ({str(error) or 'it ends in its header'})."
        ) from None
    if len(samples) != announced:
        raise UserError(f"{path}: announces {announced:,} samples, but {len(samples):,} are there.")
    clip = np.zeros(CLIP, dtype=np.float32)
    clip[: min(CLIP, len(samples))] = samples[:CLIP] / np.float32(2**15)
    return clip


def word_clips(folder: Path, word: str) -> list[Path]:
    """The clips of one word, by name.

    Raises:
        UserError: a file leads out of the folder, is none or no .wav, or a clip stands twice under two names.
    """
    found: dict[str, Path] = {}
    for path in sorted(path for path in (folder / word).iterdir() if not path.name.startswith(".")):
        if not path.resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{path}: is a link that leads out of {folder}; put the file itself there."
            )
        if path.suffix != ".wav":
            raise UserError(
                f"{path}: is no .wav file; nothing but clips belongs into a word's folder."
            )
        if not path.is_file():
            raise UserError(f"{path}: is not a file; a wav file was expected.")
        name = path.name.replace(".wav", "")  # a few names of the release end in .wav.wav
        if name in found:
            raise UserError(f"{path}: is the same clip as {found[name].name}; each may stand once.")
        found[name] = path
    if not found:
        raise UserError(f"{folder / word}: holds no wav file.")
    return list(found.values())


@register("check", "speech_commands")
def check(root: Path) -> Iterator[tuple[Path, str]]:
    """Every clip of every word, and what is wrong with it."""
    for word in sorted(path.name for path in (root / FOLDER).iterdir() if path.is_dir()):
        for path in word_clips(root / FOLDER, word) if word != "_background_noise_" else []:
            try:
                read_clip(path)
                yield path, ""
            except UserError as error:
                yield path, str(error)


def clips(
    folder: Path, words: list[str], per_word: int | None, seed: int
) -> list[tuple[Path, int]]:
    """(file, label) of every clip that is used, in the order of words and names; `per_word` of each at most, seeded.

    Raises:
        UserError: there is no such folder or word, or a file leads out of the folder.
    """
    if not folder.is_dir():
        raise UserError(
            f"dataset 'speech_commands' expects {folder}, one folder a word. Unpack speech_commands_v0.02.tar.gz there (see "
            "datasets/speech_commands.yaml), or use dataset=speech_commands_synthetic."
        )
    require(
        per_word is None or per_word > 0,
        "dataset.clips_per_word",
        per_word,
        "must be at least 1, or null for all",
    )
    here = sorted(path.name for path in folder.iterdir() if path.is_dir())
    chosen = []
    if len(set(words)) != len(words) or len(words) < 2:
        raise UserError(f"dataset.words={words}: needs at least two different words.")
    for label, word in enumerate(words):
        if word not in here:
            raise UserError(
                f"{folder}: has no folder for the word '{word}'.{suggestion(word, here)} There are: {', '.join(here)}."
            )
        found = word_clips(folder, word)
        if per_word is not None and len(found) > per_word:
            keep = np.random.default_rng([seed, label]).choice(len(found), per_word, replace=False)
            found = [found[index] for index in sorted(keep)]
        chosen += [(path, label) for path in found]
    return chosen


def split_by_speaker(speakers: list[str], test_share: float, seed: int) -> np.ndarray:
    """True for the test clips: whole speakers, drawn until `test_share` of the clips is reached."""
    people = sorted(set(speakers))
    counts = Counter(speakers)
    test: set[str] = set()
    taken = 0
    for index in np.random.default_rng(seed).permutation(len(people)):
        if taken >= test_share * len(speakers):
            break
        test.add(people[index])
        taken += counts[people[index]]
    return np.array([person in test for person in speakers])


def spectrograms(paths: list[Path], digest: str, step: int, bins: int) -> Tensor:
    """complex64 [n, frames, bins] of all clips; kept under the user's cache folder by the digest of the clips."""

    def fill(whole: np.ndarray) -> None:
        for start in range(0, len(paths), 256):
            part = np.stack([read_clip(path) for path in paths[start : start + 256]])  # [b, 16000]
            whole[start : start + len(part)] = stft(torch.from_numpy(part), step)[
                ..., :bins
            ].numpy()

    name = f"{step}-{bins}-{digest}"
    return torch.from_numpy(
        kept("spectrograms", name, (len(paths), frames(step), bins), np.complex64, fill)
    )


def scaled(z: Tensor, scale: Scale) -> Tensor:
    """z [n, frames, bins] with the modulus log(1 + 100·|z|)/log 101, 0 at 0; with its own phase or none."""
    if scale == "linear":
        return z
    modulus = torch.log1p(LOG_GAIN * z.abs()) / math.log1p(LOG_GAIN)
    return torch.polar(modulus, z.angle() if scale == "log" else torch.zeros_like(modulus))


def centred(z: Tensor) -> Tensor:
    """z [n, frames, bins], each clip turned round until its loudest part, the centre of squared mean moduli, is in the middle."""
    count = z.shape[1]
    weight = z.abs().mean(dim=2).square()  # [n, frames]
    centre = (weight * torch.arange(count)).sum(dim=1) / weight.sum(dim=1).clamp(min=1e-30)
    frame = (
        torch.arange(count) - (count // 2 - centre).round().long().unsqueeze(1)
    ) % count  # [n, frames]
    return z.gather(1, frame.unsqueeze(2).expand_as(z))


def over_grid(z: Tensor, grid: list[int]) -> Tensor:
    """Means of z [n, frames, bins] over a grid: [n, *grid]."""
    parts = torch.view_as_real(z).movedim(-1, 1)  # [n, 2, frames, bins]
    return torch.view_as_complex(
        torch.nn.functional.adaptive_avg_pool2d(parts, (grid[0], grid[1]))
        .movedim(1, -1)
        .contiguous()
    )


def held_out(speakers: list[str], split: str, test_share: float, seed: int) -> np.ndarray:
    """True for the test clips, given each clip's speaker.

    Raises:
        UserError: the share leaves none on one side.
    """
    count = len(speakers)
    require(0 <= test_share <= 1, "dataset.test_share", test_share, "must lie between 0 and 1")
    if split == "speaker":
        testing = split_by_speaker(speakers, test_share, seed)
    else:
        testing = np.zeros(count, dtype=bool)
        testing[
            np.random.default_rng(seed).choice(count, round(test_share * count), replace=False)
        ] = True
    held = int(testing.sum())
    require(
        0 < held < count,
        "dataset.test_share",
        test_share,
        f"leaves {count - held} clips to train and {held} to test",
    )
    return testing


def most_of_one(speakers: list[str], testing: np.ndarray) -> int:
    """The most training clips of any one speaker."""
    return max(
        Counter(person for person, held in zip(speakers, testing, strict=True) if not held).values()
    )


def shape_of(frame_step: int, bins: int, grid: list[int] | None) -> list[int]:
    """[frames, bins] of a spectrogram as the network gets it.

    Raises:
        UserError: an option means nothing.
    """
    require(
        0 < frame_step <= CLIP - FRAME,
        "dataset.frame_step",
        frame_step,
        f"must lie between 1 and {CLIP - FRAME}",
    )
    require(0 < bins <= BINS, "dataset.bins", bins, f"must lie between 1 and {BINS}")
    shape = grid or [frames(frame_step), bins]
    fits = len(shape) == 2 and 0 < shape[0] <= frames(frame_step) and 0 < shape[1] <= bins
    require(
        fits,
        "dataset.grid",
        grid,
        f"must be two numbers, at most {frames(frame_step)} frames and {bins} bins",
    )
    return shape


def outlined(speakers: list[str], testing: np.ndarray, words: int, shape: list[int]) -> DatasetInfo:
    """What `load` will make of clips by these speakers."""
    held = int(testing.sum())
    own = most_of_one(speakers, testing)
    return DatasetInfo(
        len(speakers) - held,
        held,
        (1, *shape),
        words,
        torch.complex64,
        examples_per_patient=own,
        unit="speaker",
    )


def load(
    folder: Path,
    provenance: Provenance,
    *,
    words: list[str],
    clips_per_word: int | None,
    split: str,
    test_share: float,
    split_seed: int,
    frame_step: int,
    bins: int,
    scale: Scale,
    align: bool,
    grid: list[int] | None,
) -> Splits:
    """Spectrograms [1, frames, bins] (one channel) and the word's index."""
    shape = shape_of(frame_step, bins, grid)
    chosen = clips(folder, words, clips_per_word, split_seed)
    paths, labels = [path for path, _ in chosen], torch.tensor([label for _, label in chosen])
    files = hashlib.sha256(
        "".join(f"{path.parent.name}/{path.name}:{sha256(path)}" for path in paths).encode()
    ).hexdigest()
    speakers = [speaker(path) for path in paths]
    testing = held_out(speakers, split, test_share, split_seed)
    inputs = scaled(spectrograms(paths, files, frame_step, bins), scale)  # [n, frames, bins]
    inputs = centred(inputs) if align else inputs
    inputs = (over_grid(inputs, shape) if grid else inputs).unsqueeze(1)  # [n, 1, *shape]
    train, test = torch.from_numpy(~testing), torch.from_numpy(testing)
    settings = repr(
        (words, clips_per_word, split, test_share, split_seed, frame_step, bins, scale, align, grid)
    )
    return Splits(
        Examples(inputs[train], labels[train]),
        Examples(inputs[test], labels[test]),
        input_shape=(1, *shape),
        outputs=len(words),
        provenance=provenance,
        digest=hashlib.sha256(f"{files}:{settings}".encode()).hexdigest(),
        notes=f"{len(paths):,} clips of {len(words)} words by {len(set(speakers)):,} speakers, split by {split}",
        examples_per_patient=most_of_one(speakers, testing),
        unit="speaker",
    )


@register("dataset", "speech_commands")
def speech_commands(
    root: Path,
    *,
    words: list[str],
    clips_per_word: int | None = None,
    split: Literal["speaker", "random"] = "speaker",
    test_share: float = 0.1,
    split_seed: int = 0,
    frame_step: int = STEP,
    bins: int = BINS,
    scale: Scale = "linear",
    align: bool = False,
    grid: list[int] | None = None,
) -> Splits:
    """SpeechCommands v0.02 under the data root: complex64 [1, 124, 129] as published.

    The release has no checksum a folder could be held to; it has 105,829 clips, and with fewer the provenance is 'derived'.
    """
    folder = root / FOLDER
    whole = folder.is_dir() and sum(1 for _ in folder.glob("*/*_nohash_*.wav")) >= 105_829
    return load(
        folder,
        "official" if whole else "derived",
        words=words,
        clips_per_word=clips_per_word,
        split=split,
        test_share=test_share,
        split_seed=split_seed,
        frame_step=frame_step,
        bins=bins,
        scale=scale,
        align=align,
        grid=grid,
    )


@register("outline", "speech_commands")
def outline(
    root: Path,
    *,
    words: list[str],
    clips_per_word: int | None,
    split: str,
    test_share: float,
    split_seed: int,
    frame_step: int,
    bins: int,
    grid: list[int] | None,
    **_: object,
) -> DatasetInfo:
    """From the clips' names; without clips, the release's 3,500 or so of a word, and 20 or so of a speaker."""
    shape = shape_of(frame_step, bins, grid)
    if holds_any(root / FOLDER):
        speakers = [
            speaker(path)
            for path, _label in clips(root / FOLDER, words, clips_per_word, split_seed)
        ]
        return outlined(
            speakers, held_out(speakers, split, test_share, split_seed), len(words), shape
        )
    require(
        clips_per_word is None or clips_per_word > 0,
        "dataset.clips_per_word",
        clips_per_word,
        "must be at least 1",
    )
    count = min(clips_per_word or 3500, 3500) * len(words)
    held = round(test_share * count)
    require(
        0 < held < count,
        "dataset.test_share",
        test_share,
        f"leaves {count - held} clips to train and {held} to test",
    )
    sizes = (count - held, held, (1, *shape), len(words), torch.complex64)
    return DatasetInfo(*sizes, examples_per_patient=20, found=False, unit="speaker")
