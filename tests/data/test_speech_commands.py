"""SpeechCommands: the transform by its definition, the split by speaker, and broken clips."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from tests.data.helpers import copy_folder
from zdp_bench.data import files
from zdp_bench.data import speech_commands as adapter
from zdp_bench.data.owners import hold_out_owners
from zdp_bench.data.speech_commands import (
    CLIP,
    FOLDER,
    RATE,
    SpeechCommands,
    average_over,
    centre,
    read_clip,
    speaker_of,
    standardise,
    stft,
)
from zdp_bench.errors import UserError
from zdp_bench.extras.standins.speech import SpeechCommandsSynthetic

WORDS = ["yes", "no"]


@pytest.fixture
def root(small_root: Path, tmp_path: Path) -> Path:
    """A data root with two words of ten clips."""
    return copy_folder(small_root, tmp_path, FOLDER)


def test_the_transform_is_tensorflows_by_its_definition() -> None:
    """tf.signal.stft(x, 255, 128): frames times a periodic Hann window, zero-padded to 256."""
    wave = np.random.default_rng(0).normal(size=CLIP)
    ours = stft(torch.from_numpy(wave[None]).float())[0].numpy()
    assert ours.shape == (124, 129)
    window = [0.5 - 0.5 * math.cos(2 * math.pi * n / 255) for n in range(255)]
    for frame in (0, 1, 77, 123):
        for k in (0, 1, 64, 128):
            expected = sum(
                wave[128 * frame + n] * window[n] * np.exp(-2j * np.pi * k * n / 256)
                for n in range(255)
            )
            assert abs(ours[frame, k] - expected) < 1e-3


def test_written_down_values_of_the_transform() -> None:
    """A 1 kHz cosine: of the window's sum, 127.5, half is in bin 16 and a quarter beside it."""
    t = torch.arange(CLIP) / RATE
    spectrum = stft(torch.cos(2 * math.pi * 1000 * t)[None])[0]
    assert abs(spectrum[0, 16].abs() - 63.75) < 0.05
    assert abs(spectrum[0, 17].abs() - 31.87) < 0.3
    assert spectrum[:, 40:].abs().max() < 0.05


def test_other_steps_frame_as_tensorflow_does() -> None:
    """Frames begin every `step` samples, and none passes the end of the clip."""
    wave = torch.randn(2, CLIP, generator=torch.Generator().manual_seed(1))
    dense = stft(wave)
    for step, count in (
        (256, 62),
        (512, 31),
        (5249, 3),
        (5248, 4),
    ):  # 3 · 5248 + 255 = 15999, 3 · 5249 + 255 = 16002
        assert stft(wave, step).shape == (2, count, 129)
    torch.testing.assert_close(stft(wave, 512), dense[:, ::4])


def test_a_smaller_and_an_easier_task(root: Path) -> None:
    whole = SpeechCommands(words=WORDS, test_share=0.3).load(root)
    small = SpeechCommands(words=WORDS, test_share=0.3, frame_step=512, bins=65).load(root)
    assert small.input_shape == (1, 31, 65)
    torch.testing.assert_close(small.train.inputs, whole.train.inputs[:, :, ::4, :65])
    loud = SpeechCommands(words=WORDS, test_share=0.3, scale="log").load(root)
    z, w = whole.train.inputs.to(torch.complex128), loud.train.inputs.to(torch.complex128)
    torch.testing.assert_close(
        w.abs(), torch.log(1 + 100 * z.abs()) / math.log(101), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(w * z.abs(), z * w.abs(), rtol=1e-4, atol=1e-5)
    bare = SpeechCommands(words=WORDS, test_share=0.3, scale="log_modulus").load(root).train.inputs
    torch.testing.assert_close(bare.real.double(), w.abs(), rtol=1e-4, atol=1e-5)
    assert not bare.imag.any()
    assert len({one.digest for one in (whole, small, loud)}) == 3
    assert len(list((root / "cache" / "zdp-bench" / "spectrograms").iterdir())) == 2


def test_clips_are_centred_each_by_itself_and_averaged_over_a_grid() -> None:
    z = torch.zeros(3, 31, 8, dtype=torch.complex64)
    z[0, 2] = 1j
    z[1, 25:28] = torch.tensor([[1 + 0j], [3 - 4j], [1 + 0j]])
    turned = centre(z)
    assert turned[0, 15].eq(1j).all()
    assert turned[1, 14:17, 0].tolist() == [1, 3 - 4j, 1]
    assert not turned[2].any()  # silence stays silence
    assert torch.equal(turned.abs().sum(dim=1), z.abs().sum(dim=1))
    assert torch.equal(centre(z[1:2])[0], turned[1])
    grid = average_over(z, [31, 2])
    torch.testing.assert_close(grid, z.unflatten(2, (2, 4)).mean(dim=3))


def test_a_clip_is_standardised_by_its_own_mean_and_size(root: Path) -> None:
    z = torch.randn(3, 5, 4, dtype=torch.complex64) * 7 + (2 - 3j)
    z[2] = 4 + 1j  # constant
    made = standardise(z)
    assert made[:2].mean(dim=(1, 2)).abs().max() < 1e-5
    torch.testing.assert_close(made[:2].abs().square().mean(dim=(1, 2)), torch.ones(2))
    assert made[2].abs().max() < 1e-3
    torch.testing.assert_close(standardise(z[1:2])[0], made[1])  # of other clips it knows nothing
    options: dict[str, Any] = {"words": WORDS, "test_share": 0.3, "grid": [16, 8]}
    plain = SpeechCommands(**options).load(root)
    own = SpeechCommands(**options, standardise="clip").load(root)
    torch.testing.assert_close(own.train.inputs[:, 0], standardise(plain.train.inputs[:, 0]))
    assert own.digest != plain.digest


def test_speakers_are_read_from_names_and_never_cross() -> None:
    assert speaker_of(Path("yes/022cd682_nohash_0.wav")) == "022cd682"
    assert speaker_of(Path("_unknown_/backward_0c540988_nohash_0.wav.wav")) == "0c540988"
    people = [f"p{n % 37}" for n in range(400)]
    testing = hold_out_owners(people, 0.25, seed=3)
    assert 0.2 < testing.mean() < 0.35
    assert not {p for p, held in zip(people, testing, strict=True) if held} & {
        p for p, held in zip(people, testing, strict=True) if not held
    }


def test_the_set_is_repeatable_cached_and_bounds_a_speaker(root: Path) -> None:
    first = SpeechCommands(words=WORDS, test_share=0.3).load(root)
    kept = next((root / "cache" / "zdp-bench" / "spectrograms").iterdir())
    before = kept.stat().st_mtime_ns
    again = SpeechCommands(words=WORDS, test_share=0.3).load(root)
    assert kept.stat().st_mtime_ns == before
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert first.digest == again.digest
    assert first.examples_per_patient == 10  # two speakers, five clips of each word
    assert (first.outputs, first.input_shape, first.provenance) == (2, (1, 124, 129), "derived")
    kept.unlink()  # not in place: it is mapped
    kept.write_bytes(b"damaged")
    assert torch.equal(
        SpeechCommands(words=WORDS, test_share=0.3).load(root).train.inputs, first.train.inputs
    )


def test_clips_per_word_and_a_random_split(root: Path) -> None:
    splits = SpeechCommands(words=WORDS, clips_per_word=6, split="random", test_share=0.25).load(
        root
    )
    assert (len(splits.train), len(splits.test)) == (9, 3)
    other = SpeechCommands(
        words=WORDS, clips_per_word=6, split="random", test_share=0.25, split_seed=1
    ).load(root)
    assert other.digest != splits.digest


def test_a_short_clip_is_padded_and_a_long_one_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, np.full(100, 0.5), RATE, subtype="PCM_16")
    clip = read_clip(path)
    assert (clip[:100] == 0.5).all()
    assert (clip[100:] == 0).all()
    soundfile.write(path, np.full(20_000, 0.5), RATE, subtype="PCM_16")
    assert read_clip(path).shape == (CLIP,)


@pytest.mark.real_data
def test_the_real_clips(data_root: Path) -> None:
    words = ["yes", "go"]
    splits = SpeechCommands(words=words, clips_per_word=None).load(data_root)
    assert len(splits.train) + len(splits.test) == 821
    assert splits.provenance == "derived"
    assert torch.isfinite(splits.train.inputs.abs()).all()


def test_two_lists_of_as_many_synthetic_words_are_two_sets(tmp_path: Path) -> None:
    for words in (["yes", "no"], ["up", "down"], ["no", "yes"]):
        made = SpeechCommandsSynthetic(words=words, clips_per_word=4, test_share=0.5).load(tmp_path)
        assert len(made.train) + len(made.test) == 8
    assert (
        len(list((tmp_path / "synthetic").iterdir())) == 3
    )  # the order, too, says what a word sounds like


def test_the_synthetic_words_can_be_told_apart(tmp_path: Path) -> None:
    splits = SpeechCommandsSynthetic(words=WORDS, clips_per_word=20, test_share=0.3).load(tmp_path)
    assert splits.provenance == "synthetic"

    def peakedness(
        examples: Any,
    ) -> torch.Tensor:  # 'no' holds its formants still, 'yes' glides through a band: [n]
        shape = torch.nn.functional.normalize(examples.inputs[:, 0].abs().mean(dim=1))  # [n, 129]
        return shape.pow(4).sum(dim=1)

    yes, no = (peakedness(splits.train)[splits.train.targets == label].mean() for label in (0, 1))
    guessed = (peakedness(splits.test) - yes).abs() > (peakedness(splits.test) - no).abs()
    assert (guessed.long() == splits.test.targets).float().mean() > 0.8


# ----------------------------------------------------------------------------------- broken clips


def wav(**changes: Any) -> Callable[[Path], None]:
    settings: dict[str, Any] = {
        "data": np.zeros(CLIP),
        "samplerate": RATE,
        "subtype": "PCM_16",
    } | changes

    def write(path: Path) -> None:
        soundfile.write(path, **settings)

    return write


def announce(path: Path, samples: int) -> None:
    """Let the header announce so many samples, whatever is there."""
    whole = bytearray(path.read_bytes())
    whole[40:44] = (2 * samples).to_bytes(4, "little")
    path.write_bytes(bytes(whole))


def stretch_format(path: Path) -> None:
    """Let the header's `fmt ` chunk announce 4 GB."""
    whole = bytearray(path.read_bytes())
    whole[16:20] = b"\xff" * 4
    path.write_bytes(bytes(whole))


def loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (
        lambda path: path.write_bytes(b""),
        r"not a readable wav file of 16-bit samples \(it ends in its header\)",
    ),
    "a web page": (
        lambda path: path.write_bytes(b"<html>not found</html>"),
        "not a readable wav file",
    ),
    "random bytes": (
        lambda path: path.write_bytes(bytes(range(256)) * 4),
        "not a readable wav file",
    ),
    "cut in its header": (
        lambda path: path.write_bytes(path.read_bytes()[:20]),
        "not a readable wav file",
    ),
    "cut in its samples": (
        lambda path: path.write_bytes(path.read_bytes()[:9044]),
        "announces 16,000 samples, but 4,500 are there",
    ),
    "half a sample": (
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "not a readable wav file|15,999 are there",
    ),
    "no samples": (wav(data=np.zeros(0)), "announces 0 samples"),
    "stereo": (wav(data=np.zeros((CLIP, 2))), "2 channels of 16-bit samples"),
    "another rate": (wav(samplerate=8000), "16-bit samples at 8000 Hz"),
    "eight bits": (wav(subtype="PCM_U8"), "1 channels of 8-bit samples"),
    "floating point": (
        wav(data=np.full(CLIP, np.nan), subtype="FLOAT"),
        r"of 16-bit samples \(unknown format: 3\)",
    ),
    "eleven seconds": (wav(data=np.zeros(11 * CLIP)), "announces 176,000 samples"),
    "a huge announced size": (
        lambda path: announce(path, 2**31 - 1),
        "announces 2,147,483,647 samples",
    ),
    "a wild size of its format": (stretch_format, "not a readable wav file"),
    "a link to itself": (loop, "a link that leads to itself"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is not a file"),
    "another ending": (lambda path: path.rename(path.with_suffix(".mp3")), "is no .wav file"),
    "a clip twice": (
        lambda path: path.with_name(f"{path.name}.wav").write_bytes(path.read_bytes()),
        "is the same clip as",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_clip_is_refused_by_name(root: Path, how: str) -> None:
    spoil, message = BROKEN[how]
    path = sorted((root / FOLDER / "no").iterdir())[3]
    spoil(path)
    with pytest.raises(UserError, match=message) as caught:
        SpeechCommands(words=WORDS).load(root)
    assert path.stem in str(caught.value)
    assert "\n" not in str(caught.value)
    problems = [
        problem for _, problem in files.check_files(root, files.card("speech_commands")) if problem
    ]
    assert problems == [str(caught.value).split(" dataset.bad_records")[0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"words": ["yes", "nope"]}, "no folder for the word 'nope'. Did you mean 'no'"),
        ({"words": ["yes"]}, "at least two different words"),
        ({"words": ["yes", "yes"]}, "at least two different words"),
        ({"words": WORDS, "bins": 130}, r"dataset\.bins=130: must lie between 1 and 129"),
        ({"words": WORDS, "frame_step": 0}, r"dataset\.frame_step=0"),
        (
            {"words": WORDS, "grid": [200, 10]},
            r"dataset\.grid=\[200, 10\]: must be two numbers, at most 124 frames",
        ),
        ({"words": WORDS, "test_share": 0.0}, "leaves 20 clips to train and 0 to test"),
    ],
)
def test_wrong_options_are_refused(root: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SpeechCommands(**options).load(root)


def test_a_missing_root_an_empty_word_and_a_link_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="dataset=speech_commands_synthetic"):
        SpeechCommands(words=WORDS).load(tmp_path / "none")
    folder = root / FOLDER
    (folder / "up").mkdir()
    with pytest.raises(UserError, match="up: holds no wav file"):
        SpeechCommands(words=["yes", "up"]).load(root)
    outside = tmp_path / "outside.wav"
    wav()(outside)
    (folder / "up" / "1_nohash_0.wav").symlink_to(outside)
    with pytest.raises(UserError, match="a link that leads out"):
        SpeechCommands(words=["yes", "up"]).load(root)


def test_a_whole_root_is_checked_clip_by_clip(root: Path, tmp_path: Path) -> None:
    card = files.card("speech_commands")
    found = list(files.check_files(root, card))
    assert [problem for _, problem in found] == [""] * 20
    assert len({path for path, _ in found}) == 20
    spoilt = sorted((root / FOLDER / "no").iterdir())
    for path in spoilt[:2]:
        path.write_bytes(b"")
    assert [path for path, problem in files.check_files(root, card) if problem] == spoilt[:2]
    ((path, problem),) = files.check_files(tmp_path / "none", card)
    assert problem.startswith(f"{path}: is missing. It comes from download.tensorflow.org")


def test_a_cache_that_cannot_be_written_costs_time_only(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(adapter.np, "save", full_disk)
    assert len(SpeechCommands(words=WORDS).load(root).train) > 0
