"""Who owns examples, patients or what a data set calls its unit: found, counted, split by them.

Neighbouring data sets differ by one example or owner. Whatever follows from a position in the data
set changes for all that stand behind it, so examples and owners are known by their content or name.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from zdp_bench.data import DatasetInfo, Source, Splits
from zdp_bench.errors import UserError

log = logging.getLogger(__name__)

DIGESTED = 1024  # examples at once


def owners_of(data: Splits, asked: str) -> np.ndarray:
    """Return the number of each training example's patient, [n].

    Args:
        asked: the setting that needs to know, for the error.

    Raises:
        UserError: the data set does not say whose examples are whose.
    """
    if data.examples_per_patient == 1:
        return np.arange(len(data.train))
    if data.train.groups is None:
        raise UserError(
            f"{asked}: a patient owns up to {data.examples_per_patient} examples of this data "
            "set, which does not state which ones, so they cannot be kept together."
        )
    return data.train.groups.numpy()


def identify_examples(source: Source) -> list[bytes]:
    """Return what identifies each example, whoever else is there: a digest of its content, [n].

    The content is input and target, without augmentation. Equal examples have equal digests.
    """
    digests = []
    for start in range(0, len(source), DIGESTED):
        indices = torch.arange(start, min(start + DIGESTED, len(source)))
        inputs, targets = source.batch(indices)
        for one, target in zip(_rows_of_bytes(inputs), _rows_of_bytes(targets), strict=True):
            content = blake2b(one, digest_size=16)
            content.update(target)
            digests.append(content.digest())
    return digests


def _rows_of_bytes(values: Tensor) -> np.ndarray:
    """Return the bytes of each example's values: [B, ...] -> uint8 [B, bytes]."""
    rows = values.resolve_conj().resolve_neg().contiguous().view(len(values), -1)
    return rows.view(torch.uint8).numpy()


def identify_owners(data: Splits, asked: str) -> tuple[np.ndarray, list[bytes]]:
    """Return the owner of each training example, counted from 0, [n], and what identifies each.

    That is the owner's name, or its number in `groups` if the data set gives no names; the content
    of the example if there are no groups. How many examples others own makes no difference.

    Args:
        asked: the setting that needs to know, for the error of `owners_of`.
    """
    numbers, owner_of = np.unique(owners_of(data, asked), return_inverse=True)
    names, groups = data.owner_names, data.train.groups
    if groups is None:
        return owner_of, identify_examples(data.train)
    if data.examples_per_patient == 1:  # `owners_of` counts the examples
        numbers = groups.numpy()
    labels = [names[number] if names else str(number) for number in numbers]
    return owner_of, [label.encode() for label in labels]


def count_owners(data: Splits | DatasetInfo, asked: str) -> int:
    """Return how many patients own the training examples; reject a set that does not say so."""
    owners = data.owners if isinstance(data, DatasetInfo) else data.train.groups
    if owners is None:
        raise UserError(
            f"{asked}: this data set does not state who owns which example (its training part has "
            "no groups), so only ε per example is known. Remove the key."
        )
    return owners if isinstance(owners, int) else len(owners.unique())


def pick_test_owners(
    owners: Sequence[str], classes: Sequence[str], test_share: float, seed: int
) -> set[str]:
    """Return the owners to test on: those whose keyed hash is below `test_share`.

    Of each class, the owner with the least hash is among them. So an owner that is trained on has
    no influence on where any other goes.

    Args:
        owners, classes: of each file.
    """
    key = str(seed).encode()
    place = {one: blake2b(one.encode(), digest_size=8, key=key).digest() for one in owners}
    first: dict[str, str] = {}
    for one, label in zip(owners, classes, strict=True):
        first[label] = min(first.get(label, one), one, key=place.__getitem__)
    limit = test_share * 2**64
    return {one for one, at in place.items() if int.from_bytes(at) < limit} | {*first.values()}


def hold_out_owners(owners: list[str], test_share: float, seed: int) -> np.ndarray:
    """Return True for the test examples: whole owners, drawn until `test_share` of the examples.

    Who is drawn depends on who is there: for a release, whose list of owners is public.
    """
    people = sorted(set(owners))
    counts = Counter(owners)
    test: set[str] = set()
    taken = 0
    for index in np.random.default_rng(seed).permutation(len(people)):
        if taken >= test_share * len(owners):
            break
        test.add(people[index])
        taken += counts[people[index]]
    return np.array([person in test for person in owners])


def require_one_spelling(where: str, what: str, names: Iterable[str]) -> None:
    """Reject names that differ only in spelling: each would count as another owner.

    That is letter case, spaces, invisible characters, the form of Unicode, zeros before a number at
    the end, or the `.0` that pandas adds to one.

    Raises:
        UserError: names two of them.
    """
    spelt: dict[str, str] = {}
    for name in sorted(names):
        alike = spelt.setdefault(_plain(name), name)
        if alike != name:
            raise UserError(
                f"{where}: {what} {alike!r} and {what} {name!r} differ in case, spaces, zeros or "
                f"Unicode form alone, and would count as two; write every {what} in one way."
            )


def _word(text: str) -> str:
    """Return a name without signs, spaces and accents: 'N/A' -> 'na', 'okänd' -> 'okand'."""
    return re.sub(r"[\W_]", "", unicodedata.normalize("NFKD", text.casefold()))


# What tables write where an owner is not known.
WORDS = """
nan nat na none null nil unknown unk missing anonymous notavailable notknown undefined empty
blank void placeholder todo tba tbc tbd anon anonymised anonymized nobody unnamed unspecified
unassigned unset withheld redacted removed invalid notapplicable notgiven notprovided
notrecorded notspecified noid nodata noname noowner nopatient novalue unidentified johndoe
unbekannt unbek unbekannter nichtbekannt keineangabe ohneangabe keine fehlt fehlend anonym
inconnu inconnue anonyme manquant nonrenseigne nonspecifie aucun aucune
desconocido desconocida anonimo ninguno ninguna faltante sindatos sinnombre nodisponible
sconosciuto sconosciuta ignoto ignota nessuno mancante desconhecido desconhecida nenhum ausente
seminformacao onbekend ontbreekt anoniem okänd saknas ukendt ukjent mangler tuntematon nieznany
nieznana brakdanych neznámý neznámá bilinmiyor ismeretlen necunoscut άγνωστο άγνωστος
неизвестно неизвестен неизвестный неизвестная невідомо нет 未知 不明 不详 不詳 无 無 미상 مجهول
"""
MISSING = {"", *map(_word, WORDS.split())}
FAR_MORE = 5  # times what others have on average


def require_named(where: str, what: str, owners: Iterable[str | int | float]) -> None:
    """Reject an owner who means a missing one, under whom strangers would count as one.

    That is an empty name or one without a letter or digit, a word such as 'nan' or 'unbekannt',
    'xxx' ('x' where not all are letters), '000-0', a negative number, and 0 beside numbers so large
    that nobody counted the owners from 0. Warn of a code, such as '0', 'P999' or a word, that has
    far more examples than others.

    Args:
        owners: of each example.

    Raises:
        UserError: names it; or two who differ in spelling alone.
    """
    names = Counter(owners)
    plain = {name: _plain(str(name)) for name in names}
    numbers = [float(text) for text in plain.values() if text.isdecimal()]
    counted = max(numbers, default=0.0) <= 10 * len(names)
    letters = all(len(text) == 1 for text in plain.values())
    for name, text in plain.items():
        word = _word(text)
        absent = word in MISSING or (re.fullmatch("x+|0{2,}", word) and not letters)
        if absent or re.fullmatch(r"-\d+(\.\d+)?", text) or (text == "0" and not counted):
            raise UserError(
                f"{where}: {what} {name!r} stands for a missing one, and its examples would count "
                f"as those of one {what}. Leave them out, or name the {what} of each."
            )
    require_one_spelling(where, what, (name for name in names if isinstance(name, str)))
    (top, most), *_ = names.most_common(1)
    is_code = re.fullmatch(r"\D*(0+|9+|8{2,})?", plain[top])  # or all letters
    if is_code and most * (len(names) - 1) > FAR_MORE * (names.total() - most) > 0:
        log.warning(
            "%s: %s %r has far more examples than any other; if that stands for a missing one, "
            "leave them out, or name the %s of each",
            *(where, what, top, what),
        )


def _plain(name: str) -> str:
    """Return what names of one owner have in common: 'P 007' -> 'p7', '7.0' -> '7'."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    text = "".join(c for c in text if c.isprintable() and not c.isspace())
    return re.sub(r"^([^\d.,]*)0*(\d+)(\.0*)?$", r"\1\2", text)
