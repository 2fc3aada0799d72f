"""SpeechCommands as complex spectrograms (Ziller et al. 2021, 5.3 and A.2.3), from .wav files.

Appendix A.2.3 uses TensorFlow's short-time Fourier transform with frames of 255 samples, every 128
samples. `tf.signal.stft` then uses an FFT length of 256 (the next power of two), a Hann window of
the frame's length, no centring and no padding at the end. The window is symmetric: TensorFlow makes
it periodic only if its length is even. This gives 1 + (16000 − 255) // 128 = 124 frames of 129
bins.

The paper's numbers disagree: it names ten words, states 2,000 clips per word but 8,000 in all, and
gives its network 8 outputs. Here the words and the number of clips per word are options, and the
network has one output per word.

Seven options make the task smaller or easier, for variants of ours. Each is a function of a single
clip, so none costs privacy: see `SpeechCommands`.
"""

from __future__ import annotations

import math
import re
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
    find_visible,
    holds_any,
    is_file_name,
    list_files,
    require_distinct,
    visible_files,
)
from zdp_bench.data.owners import digest_files, hold_out_owners
from zdp_bench.data.signals import read_sound
from zdp_bench.errors import UserError, require, suggestion
from zdp_bench.lazy import LazyModule
from zdp_bench.registry import register

fft = LazyModule("scipy.fft")

RATE = 16_000  # Hz; a clip is one second
CLIP = 16_000  # samples
FRAME, STEP, FFT = 255, 128, 256
STFT_VERSION = 2  # increment when `stft` changes; part of the digest and the cache key
BINS = FFT // 2 + 1
LOG_GAIN = 100.0
MAX_SAMPLES = 10 * CLIP  # of a file
FOLDER = Path("SpeechCommands") / "speech_commands_v0.02"
RELEASED = 105_829  # clips
SPEAKER = re.compile(r"(?:.*_)?([^_]+)_nohash_")

Clip = tuple[Path, int]  # a file and its label
Scale = Literal["linear", "log", "log_modulus"]
Standardise = Literal["clip"]


@register("dataset", "speech_commands")
@dataclass(frozen=True, kw_only=True)
class SpeechCommands(Dataset):
    """Spectrograms of clips, complex64 [1, frames, bins]; the label is the index of the word.

    Args:
        words: the words, at least two.
        clips_per_word: maximum number of clips per word, drawn at random. Default: all.
        test_share: fraction of the clips to test on.
        split: "speaker" splits by whole speakers, "random" by clip.
        split_seed: seed of both draws.
        frame_step: number of samples from one frame to the next.
        bins: number of frequency bins to keep, the lowest ones.
        scale: "log" replaces |z| by log(1 + 100·|z|) / log 101; "log_modulus" also removes the
            phase.
        align: rotate a clip in time so that the centre of its energy is in the middle.
        grid: average over a grid of [frames, bins].
        cepstrum: subtract the clip's mean, replace each frame by its cosine transform over the
            bins, and multiply the l-th coefficient by 1 + l, so that what neighbouring bins share
            does not dominate.
        standardise: "clip" gives each clip mean 0 and mean square 1.
    """

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
        are_names = all(map(is_file_name, self.words))
        require(are_names, "dataset.words", self.words, "must be names of folders, without a path")

    @property
    def shape(self) -> list[int]:
        """The shape [frames, bins] of an example."""
        return self.grid or [count_frames(self.frame_step), self.bins]

    def hold_out(self, speakers: list[str]) -> np.ndarray:
        """Draw the test clips: return True for each of them.

        Args:
            speakers: speaker of each clip.
        """
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
        """Load the clips; 'official' if the folder has as many clips as the release.

        The release has no checksums of its files.
        """
        clips = self.choose(root / FOLDER)
        paths = [path for path, _ in clips]
        labels = torch.tensor([label for _, label in clips])
        speakers = [speaker_of(path) for path in paths]
        contents = [
            f"{path.parent.name}/{path.name}:{content}"
            for path, content in zip(paths, digest_files(paths, speakers), strict=True)
        ]
        files = digest(f"{STFT_VERSION}:{''.join(contents)}")
        names, numbers = np.unique(speakers, return_inverse=True)
        owners = torch.from_numpy(numbers)
        inputs = self.prepare(self.transform(paths, files)).unsqueeze(1)
        test = torch.from_numpy(self.hold_out(speakers))
        train = ~test
        is_whole = len(find_visible(root / FOLDER, "*/*_nohash_*.wav")) == RELEASED
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
        """Return the options that enter the data's digest."""
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
        # Newer options are left out if they are not set, so that the digests of older records hold.
        if self.standardise:
            settings.append(self.standardise)
        if self.cepstrum:
            settings.append("cepstrum")
        return tuple(settings)

    def prepare(self, z: Tensor) -> Tensor:
        """Apply the options that make the task easier to spectrograms [n, frames, bins]."""
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
        """Load the spectrograms of clips, complex64 [n, frames, bins], from the cache.

        Args:
            paths: paths of the clips.
            files: digest of the clips and of `STFT_VERSION`, for the cache.
        """
        step, bins = self.frame_step, self.bins

        def blocks() -> Iterator[np.ndarray]:
            for start in range(0, len(paths), 256):
                clips = [read_clip(path) for path in paths[start : start + 256]]
                spectrograms = stft(torch.from_numpy(np.stack(clips)), step)
                yield spectrograms[..., :bins].numpy()

        shape = (len(paths), count_frames(step), bins)
        name = f"{step}-{bins}-{files}"
        return torch.from_numpy(load_or_make("spectrograms", name, shape, np.complex64, blocks()))

    def published_info(self, root: Path) -> DatasetInfo | None:
        """Estimate the counts from about 3,500 clips per word and 20 per speaker on average."""
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
            is_estimate=True,
        )

    def choose(self, folder: Path) -> list[Clip]:
        """Return the (path, label) of every clip that is used, sorted by word and name."""
        if not folder.is_dir():
            raise absent(folder, "speech_commands")
        all_words = [path.name for path in visible_files(folder) if path.is_dir()]
        chosen = []
        for label, word in enumerate(self.words):
            if word not in all_words:
                raise UserError(
                    f"{folder}: has no folder for the word '{word}'.{suggestion(word, all_words)} "
                    f"There are: {', '.join(all_words)}."
                )
            clips = find_clips(folder, word)
            max_clips = self.clips_per_word or len(clips)
            if len(clips) > max_clips:
                random = np.random.default_rng([self.split_seed, label])
                drawn = random.choice(len(clips), max_clips, replace=False)
                clips = [clips[index] for index in sorted(drawn)]
            chosen += [(path, label) for path in clips]
        return chosen


def _is_at_most(side: int, max_side: int) -> bool:
    return 0 < side <= max_side


def count_frames(step: int) -> int:
    """Return the number of frames of a clip, such as 124 for a step of 128 samples."""
    return 1 + (CLIP - FRAME) // step


def stft(waves: Tensor, step: int = STEP) -> Tensor:
    """Compute `tf.signal.stft(waves, 255, step)`: float [B, 16000] -> complex64 [B, frames, 129].

    The window is TensorFlow's for an odd length (`_raised_cosine_window` of its window_ops.py):
    symmetric, with a weight of 0 at both ends.

    The frames of `torch.stft` have the FFT length, one sample more. The window's weight of that
    sample is 0, so padding the clip with a zero has no effect on the result.
    """
    waves = F.pad(waves, (0, FFT - FRAME))
    window = F.pad(torch.hann_window(FRAME, periodic=False), (0, FFT - FRAME))
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
    """Return the speaker in a file's name: '0a7c2a8d' for '0a7c2a8d_nohash_0.wav'."""
    match = SPEAKER.match(clip.name)
    if match is None:
        raise UserError(
            f"{clip}: its name does not identify the speaker, unlike 0a7c2a8d_nohash_0.wav."
        )
    return match[1]


def read_clip(path: Path) -> np.ndarray:
    """Read a clip as float32 [16000] in [-1, 1), cut or zero-padded at the end."""
    samples = read_sound(path, RATE, 1, MAX_SAMPLES)[:CLIP, 0]
    clip = np.zeros(CLIP, dtype=np.float32)
    clip[: len(samples)] = samples
    return clip


def find_clips(folder: Path, word: str) -> list[Path]:
    """List the clips of a word, sorted by name."""
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
    """Replace the modulus of z [n, frames, bins] by log(1 + 100·|z|) / log 101; see `scale`."""
    if scale == "linear":
        return z
    modulus = torch.log1p(LOG_GAIN * z.abs()) / math.log1p(LOG_GAIN)
    phase = z.angle() if scale == "log" else torch.zeros_like(modulus)
    return torch.polar(modulus, phase)


def centre(z: Tensor) -> Tensor:
    """Rotate each clip of z [n, frames, bins] in time so that its energy is centred.

    The energy of a frame is the square of its mean modulus.
    """
    count = z.shape[1]
    weight = z.abs().mean(dim=2).square()  # [n, frames]
    total = weight.sum(dim=1).clamp(min=1e-30)
    centre_of_energy = (weight * torch.arange(count)).sum(dim=1) / total
    shift = (count // 2 - centre_of_energy).round().long().unsqueeze(1)
    frame = (torch.arange(count) - shift) % count  # [n, frames]
    return z.gather(1, frame.unsqueeze(2).expand_as(z))


def average_over(z: Tensor, grid: list[int]) -> Tensor:
    """Average z [n, frames, bins] over the cells of a grid: [n, *grid]."""
    parts = torch.view_as_real(z).movedim(-1, 1)  # [n, 2, frames, bins]
    means = F.adaptive_avg_pool2d(parts, (grid[0], grid[1]))
    return torch.view_as_complex(means.movedim(1, -1).contiguous())


def lifter(z: Tensor) -> Tensor:
    """Return (1 + l)·DCT(z − mean)ₗ of each frame over the bins of z [n, frames, bins]."""
    centred = z - z.mean(dim=(1, 2), keepdim=True)
    parts = torch.view_as_real(centred).numpy()  # [n, frames, bins, 2]
    coefficients = torch.from_numpy(fft.dct(parts, axis=2, norm="ortho"))
    coefficients *= torch.arange(1, z.shape[2] + 1, dtype=coefficients.dtype).unsqueeze(1)
    return torch.view_as_complex(coefficients.contiguous())


def standardise(z: Tensor) -> Tensor:
    """Give each clip of z [n, frames, bins] mean 0 and mean square 1; constant clips become 0."""
    centred = z - z.mean(dim=(1, 2), keepdim=True)
    power = centred.abs().square().mean(dim=(1, 2), keepdim=True)
    return centred * power.clamp(min=1e-12).rsqrt()
