"""SpeechCommands as complex spectrograms (Ziller et al. 2021, 5.3 and A.2.3), from its wav folders.

A.2.3 uses TensorFlow's short-time Fourier transform with frames of 255 samples every 128.
`tf.signal.stft` then takes the next power of two, 256, as FFT length, a periodic Hann window of the
frame's length, no centring and no padding at the end: 1 + (16000 − 255) // 128 = 124 frames of 129
bins.

The paper names ten words, counts 8,000 clips where ten times 2,000 would be 20,000, and gives its
network 8 outputs. Here the words and the clips per word are keys, and the network has one output a
word.

Seven keys make a smaller or an easier task of it, for variants of ours; each works on one clip
alone, so it costs no privacy: `frame_step`, `bins` (the lowest are kept), `scale` (log: |z| becomes
log(1 + 100·|z|)/log 101; log_modulus: that without the phase), `align` (a clip is rotated in time
until its energy is centred), `grid` (means over so many frames × bins), `cepstrum` (each frame of
the clip, less the clip's mean, becomes its cosine transform over the bins, the l-th coefficient
times 1 + l: what is alike in neighbouring bins no longer outweighs the rest) and `standardise`
(clip: each clip's mean becomes 0 and its mean square 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Interval, Len
from torch import Tensor

from zdp_bench.data import Dataset, DatasetInfo, Examples, MaxCount, Splits
from zdp_bench.data.cache import load_or_make
from zdp_bench.data.files import (
    absent,
    digest,
    holds_any,
    list_files,
    require_distinct,
    sha256,
)
from zdp_bench.data.owners import hold_out_owners
from zdp_bench.data.signals import read_sound
from zdp_bench.errors import UserError, require, suggestion
from zdp_bench.lazy import LazyModule
from zdp_bench.registry import register

fft = LazyModule("scipy.fft")

RATE = 16_000  # Hz; a clip is one second
CLIP = 16_000  # samples
FRAME, STEP, FFT = 255, 128, 256
BINS = FFT // 2 + 1
LOG_GAIN = 100.0
LARGEST = 10 * CLIP  # samples; a file that announces more is no clip of this set
FOLDER = Path("SpeechCommands") / "speech_commands_v0.02"
RELEASED = 105_829  # clips

Clip = tuple[Path, int]  # a file and its label
Scale = Literal["linear", "log", "log_modulus"]
Standardise = Literal["clip"]


@register("dataset", "speech_commands")
@dataclass(frozen=True, kw_only=True)
class SpeechCommands(Dataset):
    """Spectrograms complex64 [1, frames, bins] of clips, and the word's index."""

    words: Annotated[list[str], Len(2)]
    clips_per_word: MaxCount = None
    test_share: Annotated[float, Interval(ge=0, le=1)] = 0.1
    split: Literal["speaker", "random"] = "speaker"
    split_seed: int = 0
    frame_step: Annotated[int, Interval(ge=1, le=CLIP - FRAME)] = STEP
    bins: Annotated[int, Interval(ge=1, le=BINS)] = BINS
    scale: Scale = "linear"
    align: bool = False
    grid: list[int] | None = None
    cepstrum: bool = False
    standardise: Standardise | None = None

    def __post_init__(self) -> None:
        frames = count_frames(self.frame_step)
        if self.grid:
            sides = (frames, self.bins)
            fits = len(self.grid) == 2 and all(map(_is_at_most, self.grid, sides))
            rule = f"must be two numbers, at most {frames} frames and {self.bins} bins"
            require(fits, "dataset.grid", self.grid, rule)
        is_distinct = len(set(self.words)) == len(self.words)
        require(is_distinct, "dataset.words", self.words, "must name each word once")

    @property
    def shape(self) -> list[int]:
        """[frames, bins] of a spectrogram as the network gets it."""
        return self.grid or [count_frames(self.frame_step), self.bins]

    def hold_out(self, speakers: list[str]) -> np.ndarray:
        """Return True for the test clips, given each clip's speaker."""
        count = len(speakers)
        if self.split == "speaker":
            testing = hold_out_owners(speakers, self.test_share, self.split_seed)
        else:
            random = np.random.default_rng(self.split_seed)
            drawn = random.choice(count, round(self.test_share * count), replace=False)
            testing = np.zeros(count, dtype=bool)
            testing[drawn] = True
        held = int(testing.sum())
        rule = f"leaves {count - held} clips to train and {held} to test"
        require(0 < held < count, "dataset.test_share", self.test_share, rule)
        return testing

    def load(self, root: Path) -> Splits:
        """The release has no checksum for a folder: with another count it is 'derived'."""
        clips = self.choose(root / FOLDER)
        paths = [path for path, _ in clips]
        labels = torch.tensor([label for _, label in clips])
        contents = [f"{path.parent.name}/{path.name}:{sha256(path)}" for path in paths]
        files = digest("".join(contents))
        speakers = [speaker_of(path) for path in paths]
        names, numbers = np.unique(speakers, return_inverse=True)
        owners = torch.from_numpy(numbers)
        inputs = self.prepare(self.transform(paths, files)).unsqueeze(1)
        test = torch.from_numpy(self.hold_out(speakers))
        train = ~test
        is_whole = sum(1 for _ in (root / FOLDER).glob("*/*_nohash_*.wav")) == RELEASED
        return Splits(
            Examples(inputs[train], labels[train], owners[train]),
            Examples(inputs[test], labels[test], owners[test]),
            input_shape=(1, *self.shape),
            outputs=len(self.words),
            provenance="official" if is_whole else "derived",
            digest=digest(f"{files}:{self._settings()!r}"),
            notes=f"{len(paths):,} clips of {len(self.words)} words by {len(names):,} "
            f"speakers, split by {self.split}",
            unit="speaker",
            parts_share_owners=self.split == "random",
            owner_names=names.tolist(),
        )

    def _settings(self) -> tuple[Any, ...]:
        """Return what becomes part of the data's digest, beside the files."""
        settings: list[Any] = [
            self.words,
            self.clips_per_word,
            self.split,
            self.test_share,
            self.split_seed,
            self.frame_step,
            self.bins,
            self.scale,
            self.align,
            self.grid,
        ]
        # What is not set is left out, so that older records keep their data's digest.
        if self.standardise:
            settings.append(self.standardise)
        if self.cepstrum:
            settings.append("cepstrum")
        return tuple(settings)

    def prepare(self, z: Tensor) -> Tensor:
        """Make an easier task of spectrograms [n, frames, bins], as the options say."""
        z = rescale(z, self.scale)
        if self.align:
            z = centre(z)
        if self.grid:
            z = average_over(z, self.grid)
        if self.cepstrum:
            z = lifter(z)
        if self.standardise:
            z = standardise(z)
        return z

    def transform(
        self,
        paths: list[Path],
        files: str,
    ) -> Tensor:
        """Return complex64 [n, frames, bins] of all clips, cached by the files' digest."""
        step, bins = self.frame_step, self.bins

        def blocks() -> Iterator[np.ndarray]:
            for start in range(0, len(paths), 256):
                clips = [read_clip(path) for path in paths[start : start + 256]]
                spectrograms = stft(torch.from_numpy(np.stack(clips)), step)
                yield spectrograms[..., :bins].numpy()

        shape = (len(paths), count_frames(step), bins)
        name = f"{step}-{bins}-{files}"
        return torch.from_numpy(load_or_make("spectrograms", name, shape, np.complex64, blocks()))

    def released(self, root: Path) -> DatasetInfo | None:
        """About 3,500 clips of a word and 20 of a speaker."""
        if holds_any(root / FOLDER):
            return None
        count = min(self.clips_per_word or 3500, 3500) * len(self.words)
        test = round(self.test_share * count)
        return DatasetInfo(
            train=count - test,
            test=test,
            input_shape=(1, *self.shape),
            outputs=len(self.words),
            dtype=torch.complex64,
            examples_per_patient=20,
            unit="speaker",
            owners=(count - test) // 20,
        )

    def choose(self, folder: Path) -> list[Clip]:
        """Choose (file, label) of every clip that is used, in the order of words and names."""
        if not folder.is_dir():
            raise absent(folder, "speech_commands")
        here = sorted(path.name for path in folder.iterdir() if path.is_dir())
        chosen = []
        for label, word in enumerate(self.words):
            if word not in here:
                raise UserError(
                    f"{folder}: has no folder for the word '{word}'.{suggestion(word, here)} "
                    f"There are: {', '.join(here)}."
                )
            clips = find_clips(folder, word)
            most = self.clips_per_word or len(clips)
            if len(clips) > most:
                random = np.random.default_rng([self.split_seed, label])
                drawn = random.choice(len(clips), most, replace=False)
                clips = [clips[index] for index in sorted(drawn)]
            chosen += [(path, label) for path in clips]
        return chosen


def _is_at_most(side: int, most: int) -> bool:
    return 0 < side <= most


def count_frames(step: int) -> int:
    """How many frames a clip has: 124 every 128 samples."""
    return 1 + (CLIP - FRAME) // step


def stft(waves: Tensor, step: int = STEP) -> Tensor:
    """tf.signal.stft(waves, 255, step): float [B, 16000] -> complex64 [B, frames, 129].

    torch's `stft` frames by the FFT length, one sample more, whose weight is 0: a zero behind the
    clip is not seen.
    """
    waves = F.pad(waves, (0, FFT - FRAME))
    window = F.pad(torch.hann_window(FRAME, periodic=True), (0, FFT - FRAME))
    spectra = torch.stft(
        waves,
        n_fft=FFT,
        hop_length=step,
        win_length=FFT,
        window=window,
        center=False,
        return_complex=True,
    )
    return spectra.transpose(1, 2)


def speaker_of(clip: Path) -> str:
    """'0a7c2a8d_nohash_0.wav' -> '0a7c2a8d', by the release's README."""
    return clip.name.split("_nohash_")[0].split("_")[-1]


def read_clip(path: Path) -> np.ndarray:
    """Read one clip as float32 [16000] in [-1, 1), padded with zeros at the end or cut."""
    samples = read_sound(path, RATE, 1, LARGEST)[:CLIP, 0]
    clip = np.zeros(CLIP, dtype=np.float32)
    clip[: len(samples)] = samples
    return clip


def find_clips(folder: Path, word: str) -> list[Path]:
    """List the clips of one word, by name."""
    paths = list_files(
        folder / word,
        folder,
        lambda path: path.suffix == ".wav",
        "is not a .wav file; only clips belong in a word's folder",
    )
    if not paths:
        raise UserError(f"{folder / word}: contains no wav file.")
    # a few names of the release end in .wav.wav
    require_distinct(paths, lambda path: path.name.replace(".wav", ""), "clip")
    return paths


def rescale(z: Tensor, scale: Scale) -> Tensor:
    """Give z [n, frames, bins] the modulus log(1 + 100·|z|)/log 101, with its own phase or none."""
    if scale == "linear":
        return z
    modulus = torch.log1p(LOG_GAIN * z.abs()) / math.log1p(LOG_GAIN)
    phase = z.angle() if scale == "log" else torch.zeros_like(modulus)
    return torch.polar(modulus, phase)


def centre(z: Tensor) -> Tensor:
    """Rotate each clip of z [n, frames, bins] until its loudest part is in the middle.

    The loudest part is the centre of squared mean moduli.
    """
    count = z.shape[1]
    weight = z.abs().mean(dim=2).square()  # [n, frames]
    total = weight.sum(dim=1).clamp(min=1e-30)
    loudest = (weight * torch.arange(count)).sum(dim=1) / total
    shift = (count // 2 - loudest).round().long().unsqueeze(1)
    frame = (torch.arange(count) - shift) % count  # [n, frames]
    return z.gather(1, frame.unsqueeze(2).expand_as(z))


def average_over(z: Tensor, grid: list[int]) -> Tensor:
    """Average z [n, frames, bins] over a grid: [n, *grid]."""
    parts = torch.view_as_real(z).movedim(-1, 1)  # [n, 2, frames, bins]
    means = F.adaptive_avg_pool2d(parts, (grid[0], grid[1]))
    return torch.view_as_complex(means.movedim(1, -1).contiguous())


def lifter(z: Tensor) -> Tensor:
    """Return (1 + l)·DCT(z − mean)ₗ over the bins of each frame of z [n, frames, bins]."""
    centred = z - z.mean(dim=(1, 2), keepdim=True)
    parts = torch.view_as_real(centred).numpy()  # [n, frames, bins, 2]
    coefficients = torch.from_numpy(fft.dct(parts, axis=2, norm="ortho"))
    coefficients *= torch.arange(1, z.shape[2] + 1, dtype=coefficients.dtype).unsqueeze(1)
    return torch.view_as_complex(coefficients.contiguous())


def standardise(z: Tensor) -> Tensor:
    """Give each clip of z [n, frames, bins] mean 0 and mean square 1; a constant one becomes 0."""
    centred = z - z.mean(dim=(1, 2), keepdim=True)
    power = centred.abs().square().mean(dim=(1, 2), keepdim=True)
    return centred * power.clamp(min=1e-12).rsqrt()
