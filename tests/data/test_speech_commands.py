"""SpeechCommands: the transform by its definition and the split by speaker."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from tests.data.helpers import assert_refused
from zdp_bench.data import speech_commands as speech
from zdp_bench.data.owners import hold_out_owners
from zdp_bench.data.speech_commands import CLIP, RATE, SpeechCommands
from zdp_bench.errors import UserError

WORDS = ["yes", "no"]


def tensorflows_hann_window(length: int) -> np.ndarray:
    """`tf.signal.hann_window(length, periodic=True)`: symmetric if the length is odd."""
    is_even = length % 2 == 0
    period = length if is_even else length - 1
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / period)


def test_the_transform_is_tensorflows_by_its_definition() -> None:
    """tf.signal.stft(x, 255, 128): frames times its Hann window, zero-padded to 256."""
    wave = np.random.default_rng(0).normal(size=CLIP)
    ours = speech.stft(torch.from_numpy(wave[None]).float())[0].numpy()
    assert ours.shape == (124, 129)
    window = tensorflows_hann_window(255)
    for frame in (0, 1, 77, 123):
        for k in (0, 1, 64, 128):
            turns = np.exp(-2j * np.pi * k * np.arange(255) / 256)
            expected = (wave[128 * frame :][:255] * window * turns).sum()
            assert abs(ours[frame, k] - expected) < 1e-3


def test_spectrograms_of_another_version_have_another_digest(
    small_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"words": WORDS, "test_share": 0.3}
    current = SpeechCommands(**options).load(small_root)
    monkeypatch.setattr(speech, "STFT_VERSION", 1)
    assert SpeechCommands(**options).load(small_root).digest != current.digest
    assert len(list((tmp_path / "cache" / "zdp-bench" / "spectrograms").iterdir())) == 2


def test_other_steps_frame_as_tensorflow_does() -> None:
    """Frames begin every `step` samples, and none passes the end of the clip."""
    wave = torch.randn(2, CLIP, generator=torch.Generator().manual_seed(1))
    dense = speech.stft(wave)
    # 3 · 5248 + 255 = 15999, 3 · 5249 + 255 = 16002
    for step, count in ((256, 62), (512, 31), (5249, 3), (5248, 4)):
        assert speech.stft(wave, step).shape == (2, count, 129)
    torch.testing.assert_close(speech.stft(wave, 512), dense[:, ::4])


def test_a_smaller_and_an_easier_task(small_root: Path, tmp_path: Path) -> None:
    whole = SpeechCommands(words=WORDS, test_share=0.3).load(small_root)
    small = SpeechCommands(words=WORDS, test_share=0.3, frame_step=512, bins=65).load(small_root)
    assert small.input_shape == (1, 31, 65)
    torch.testing.assert_close(small.train.inputs, whole.train.inputs[:, :, ::4, :65])
    loud = SpeechCommands(words=WORDS, test_share=0.3, scale="log").load(small_root)
    z, w = whole.train.inputs.to(torch.complex128), loud.train.inputs.to(torch.complex128)
    scaled = torch.log(1 + 100 * z.abs()) / math.log(101)
    torch.testing.assert_close(w.abs(), scaled, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(w * z.abs(), z * w.abs(), rtol=1e-4, atol=1e-5)
    bare = (
        SpeechCommands(words=WORDS, test_share=0.3, scale="log_modulus")
        .load(small_root)
        .train.inputs
    )
    torch.testing.assert_close(bare.real.double(), w.abs(), rtol=1e-4, atol=1e-5)
    assert not bare.imag.any()
    assert len({splits.digest for splits in (whole, small, loud)}) == 3
    assert len(list((tmp_path / "cache" / "zdp-bench" / "spectrograms").iterdir())) == 2


def test_clips_are_centred_each_by_itself_and_averaged_over_a_grid() -> None:
    z = torch.zeros(3, 31, 8, dtype=torch.complex64)
    z[0, 2] = 1j
    z[1, 25:28] = torch.tensor([[1 + 0j], [3 - 4j], [1 + 0j]])
    turned = speech.centre(z)
    assert turned[0, 15].eq(1j).all()
    assert turned[1, 14:17, 0].tolist() == [1, 3 - 4j, 1]
    assert not turned[2].any()  # silence stays silence
    assert torch.equal(turned.abs().sum(dim=1), z.abs().sum(dim=1))
    assert torch.equal(speech.centre(z[1:2])[0], turned[1])
    grid = speech.average_over(z, [31, 2])
    torch.testing.assert_close(grid, z.unflatten(2, (2, 4)).mean(dim=3))


def test_cepstra_weigh_what_changes_from_bin_to_bin_and_not_the_level() -> None:
    bins = torch.arange(12)
    waves = [torch.cos(math.pi * order * (2 * bins + 1) / 24) for order in (1, 5)]
    z = torch.stack([torch.stack([wave, -wave]) for wave in waves]).to(torch.complex64)
    for number, order in enumerate((1, 5)):
        made = speech.lifter(z + 7)[number]
        expected = torch.zeros(2, 12, dtype=torch.complex64)
        expected[:, order] = (1 + order) * math.sqrt(6) * torch.tensor([1.0, -1.0])
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


def test_a_clip_is_standardised_by_its_own_mean_and_size(small_root: Path) -> None:
    z = torch.randn(3, 5, 4, dtype=torch.complex64) * 7 + (2 - 3j)
    z[2] = 4 + 1j  # constant
    made = speech.standardise(z)
    assert made[:2].mean(dim=(1, 2)).abs().max() < 1e-5
    torch.testing.assert_close(made[:2].abs().square().mean(dim=(1, 2)), torch.ones(2))
    assert made[2].abs().max() < 1e-3
    torch.testing.assert_close(
        speech.standardise(z[1:2])[0], made[1]
    )  # of other clips it knows nothing
    options: dict[str, Any] = {"words": WORDS, "test_share": 0.3, "grid": [16, 8]}
    plain = SpeechCommands(**options).load(small_root)
    own = SpeechCommands(**options, standardise="clip").load(small_root)
    torch.testing.assert_close(own.train.inputs[:, 0], speech.standardise(plain.train.inputs[:, 0]))
    assert own.digest != plain.digest


@pytest.mark.parametrize("word", ["", ".", "..", "a/b", "/a", "C:a", "a\\b", "a\0", "a\n"])
def test_a_word_that_is_not_a_folder_name_is_refused(word: str) -> None:
    with pytest.raises(UserError, match="must be names of folders, without a path"):
        SpeechCommands(words=["yes", word])


def test_speakers_are_read_from_names_and_never_cross() -> None:
    assert speech.speaker_of(Path("yes/022cd682_nohash_0.wav")) == "022cd682"
    assert speech.speaker_of(Path("_unknown_/backward_0c540988_nohash_0.wav.wav")) == "0c540988"
    assert_refused(
        lambda: speech.speaker_of(Path("yes/alice_0.wav")),
        "yes/alice_0.wav",
        "does not identify the speaker",
    )
    people = [f"p{n % 37}" for n in range(400)]
    testing = hold_out_owners(people, 0.25, seed=3)
    assert 0.2 < testing.mean() < 0.35
    held, kept = (set(np.array(people)[chosen]) for chosen in (testing, ~testing))
    assert not held & kept


def test_a_short_clip_is_padded_and_a_long_one_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, np.full(100, 0.5), RATE, subtype="PCM_16")
    clip = speech.read_clip(path)
    assert (clip[:100] == 0.5).all()
    assert (clip[100:] == 0).all()
    soundfile.write(path, np.full(20_000, 0.5), RATE, subtype="PCM_16")
    assert speech.read_clip(path).shape == (CLIP,)


@pytest.mark.slow
@pytest.mark.real_data
def test_the_real_clips(data_root: Path) -> None:
    words = ["yes", "go"]
    splits = SpeechCommands(words=words, clips_per_word=None).load(data_root)
    assert len(splits.train) + len(splits.test) == 821
    assert splits.provenance == "derived"
    assert torch.isfinite(splits.train.inputs.abs()).all()
