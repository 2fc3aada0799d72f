"""A stand-in for SpeechCommands that needs no download: word-like chirps as wav files in its layout, read by the real adapter.

A word is two gliding formants with a contour of its own; a speaker shifts pitch and tempo, a clip adds noise and an onset.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from scipy.signal import chirp

from zdp_bench.data import DatasetInfo, Splits
from zdp_bench.data.files import made_whole
from zdp_bench.data.speech_commands import (
    BINS,
    CLIP,
    RATE,
    STEP,
    Scale,
    held_out,
    load,
    outlined,
    shape_of,
)
from zdp_bench.errors import require
from zdp_bench.registry import register


def utterance(
    word: int, words: int, speaker: np.random.Generator, clip: np.random.Generator
) -> np.ndarray:
    """One clip: float [16000]. `speaker` and `clip` say what varies between people and between a person's clips."""
    pitch, tempo = speaker.uniform(0.85, 1.2), speaker.uniform(0.85, 1.15)
    length = int(RATE * 0.45 * tempo)
    t = np.arange(length) / RATE
    low, high = (
        350 + 900 * word / words,
        900 + 2200 * ((word * 3) % words) / words,
    )  # Hz: where each formant begins
    voiced = chirp(t, low * pitch, t[-1], (1600 - low) * pitch) + 0.6 * chirp(
        t, high * pitch, t[-1], (3600 - high) * pitch
    )
    start = clip.integers(0, CLIP - length)
    sound = clip.normal(0, 0.02, CLIP)
    sound[start : start + length] += 0.3 * clip.uniform(0.6, 1.2) * np.hanning(length) * voiced
    return sound.clip(-1, 1 - 2**-15)


def _taken(number: int, clips_per_word: int) -> tuple[int, int]:
    """Who speaks a word's clip of this number, and which of this person's clips of the word it is."""
    people = max(2, clips_per_word // 5)
    return number % people, number // people


def write_set(folder: Path, words: list[str], clips_per_word: int, seed: int) -> None:
    """`clips_per_word` wav files of each word, by a fifth as many speakers; whole or not at all."""
    import soundfile

    with made_whole(folder) as partial:
        for label, word in enumerate(words):
            (partial / word).mkdir()
            for number in range(clips_per_word):
                person, take = _taken(number, clips_per_word)
                voice, clip = (
                    np.random.default_rng([seed, person]),
                    np.random.default_rng([seed, label, number, 1]),
                )
                sound = utterance(label, len(words), voice, clip)
                name = f"{person:08x}_nohash_{take}.wav"
                soundfile.write(
                    str(partial / word / name), sound.astype(np.float32), RATE, subtype="PCM_16"
                )


@register("dataset", "speech_commands_synthetic")
def speech_commands_synthetic(
    root: Path,
    *,
    words: list[str],
    clips_per_word: int = 60,
    seed: int = 0,
    test_share: float = 0.1,
    frame_step: int = STEP,
    bins: int = BINS,
    scale: Scale = "linear",
    align: bool = False,
    grid: list[int] | None = None,
) -> Splits:
    """Synthetic words, written once under `synthetic/` and read as SpeechCommands is: complex64 [1, 124, 129] as published."""
    _check(words, clips_per_word)
    listed = hashlib.sha256(repr(list(words)).encode()).hexdigest()[
        :16
    ]  # two lists of one length are two sets
    folder = root / "synthetic" / f"speech-{listed}-{clips_per_word}-{seed}"
    if not folder.is_dir():
        write_set(folder, words, clips_per_word, seed)
    return load(
        folder,
        "synthetic",
        words=words,
        clips_per_word=None,
        split="speaker",
        test_share=test_share,
        split_seed=seed,
        frame_step=frame_step,
        bins=bins,
        scale=scale,
        align=align,
        grid=grid,
    )


def _check(words: list[str], clips_per_word: int) -> None:
    require(clips_per_word > 0, "dataset.clips_per_word", clips_per_word, "must be at least 1")
    require(
        len(set(words)) == len(words) > 1,
        "dataset.words",
        words,
        "needs at least two different words",
    )


@register("outline", "speech_commands_synthetic")
def outline(
    root: Path,
    *,
    words: list[str],
    clips_per_word: int,
    seed: int,
    test_share: float,
    frame_step: int,
    bins: int,
    grid: list[int] | None,
    **_: object,
) -> DatasetInfo:
    """Known before anything is drawn."""
    _check(words, clips_per_word)
    speakers = [
        f"{_taken(number, clips_per_word)[0]:08x}"
        for _word in words
        for number in range(clips_per_word)
    ]
    return outlined(
        speakers,
        held_out(speakers, "speaker", test_share, seed),
        len(words),
        shape_of(frame_step, bins, grid),
    )
