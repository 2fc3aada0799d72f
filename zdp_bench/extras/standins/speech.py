"""A stand-in for SpeechCommands without a download: word-like chirps as WAV files in its layout.

A word is two gliding formants whose frequencies depend on the word. Pitch and tempo vary between
speakers, noise, loudness and onset between clips.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Interval
from scipy.signal import chirp

from zdp_bench.data import Splits
from zdp_bench.data.speech_commands import CLIP, FOLDER, RATE, SpeechCommands
from zdp_bench.extras.standins.drawing import StandIn
from zdp_bench.registry import register


def synthesise(
    word: int,
    words: int,
    speaker: np.random.Generator,
    clip: np.random.Generator,
) -> np.ndarray:
    """Return one clip, float [16000].

    Args:
        word: index of the word.
        words: number of words.
        speaker: draws pitch and tempo, which are the same in all clips of a speaker.
        clip: draws noise, loudness and onset.
    """
    pitch = speaker.uniform(0.85, 1.2)
    tempo = speaker.uniform(0.85, 1.15)
    length = int(RATE * 0.45 * tempo)
    t = np.arange(length) / RATE
    # The frequencies in Hz at which the formants begin.
    low = 350 + 900 * word / words
    high = 900 + 2200 * ((word * 3) % words) / words
    first = chirp(t, low * pitch, t[-1], (1600 - low) * pitch)
    second = chirp(t, high * pitch, t[-1], (3600 - high) * pitch)
    voiced = first + 0.6 * second
    start = clip.integers(0, CLIP - length)
    sound = clip.normal(0, 0.02, CLIP)
    loudness = 0.3 * clip.uniform(0.6, 1.2)
    sound[start : start + length] += loudness * np.hanning(length) * voiced
    return sound.clip(-1, 1 - 2**-15)


@register("dataset", "speech_commands_synthetic")
@dataclass(frozen=True, kw_only=True)
class SpeechCommandsSynthetic(StandIn, SpeechCommands):
    """Synthetic words in SpeechCommands' layout."""

    drawn: ClassVar[tuple[str, ...]] = ("words", "clips_per_word", "seed")

    clips_per_word: Annotated[int, Interval(ge=1, le=4000)] | None = 60
    seed: int = 0

    def write(self, folder: Path) -> None:
        import soundfile

        clips, words = self.clips_per_word or 60, self.words
        for label, word in enumerate(words):
            (folder / FOLDER / word).mkdir(parents=True)
            for number in range(clips):
                take, speaker = divmod(number, max(2, clips // 5))  # a fifth as many speakers
                voice = np.random.default_rng([self.seed, speaker])
                clip = np.random.default_rng([self.seed, label, number, 1])
                sound = synthesise(label, len(words), voice, clip).astype(np.float32)
                path = folder / FOLDER / word / f"{speaker:08x}_nohash_{take}.wav"
                soundfile.write(str(path), sound, RATE, subtype="PCM_16")

    def read_folder(self, folder: Path) -> Splits:
        return SpeechCommands.load(replace(self, clips_per_word=None), folder)
