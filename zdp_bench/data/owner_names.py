"""Names of owners: refused where one stands for a missing one, or two for the same."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal
from functools import lru_cache

from zdp_bench.errors import UserError

log = logging.getLogger(__name__)

FILE_NAME = re.compile(r".*\.[a-z]\w*", re.IGNORECASE | re.DOTALL)


@lru_cache(maxsize=8)
def require_owner_names(what: str, names: tuple[str, ...]) -> None:
    """Reject the names of a data set's owners if one is missing, or two name the same owner.

    An owner with two names counts as two, and strangers without one as one: no ε would cover them.
    Files' names, of owners who have no other, need only differ.

    Args:
        names: of all owners, once each.

    Raises:
        UserError: see `require_named`; or a name stands there twice.
    """
    if not names:
        return
    ((name, times),) = Counter(names).most_common(1)
    if times > 1:
        raise UserError(
            f"dataset: {what} {name!r} has {times} numbers in `groups`, and would count as "
            f"{times}; give each {what} one number."
        )
    if identifiers := [name for name in names if not FILE_NAME.fullmatch(name)]:
        require_named("dataset", what, identifiers)


def require_one_spelling(
    where: str,
    what: str,
    names: Iterable[str],
) -> None:
    """Reject names that differ only in spelling: each would count as another owner.

    That is letter case, spaces, invisible characters, the form of Unicode, quotes, zeros before the
    first number, or the form of a number, such as the `7.0` and `1e+05` of pandas.

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
nan 1qnan nat na pdna none null nil unknown unk missing anonymous notavailable notknown undefined
empty blank void placeholder todo tba tbc tbd anon anonymised anonymized nobody unnamed unspecified
unassigned unset withheld redacted removed invalid notapplicable notgiven notprovided
notrecorded notspecified noid nodata noname noowner nopatient novalue unidentified johndoe
unbekannt unbek unbekannter nichtbekannt keineangabe ohneangabe ohne keine fehlt fehlend anonym
inconnu inconnue anonyme manquant nonrenseigne nonspecifie aucun aucune
desconocido desconocida anonimo ninguno ninguna faltante sindatos sinnombre nodisponible
sconosciuto sconosciuta ignoto ignota nessuno mancante desconhecido desconhecida nenhum ausente
seminformacao onbekend ontbreekt anoniem okänd saknas ukendt ukjent mangler tuntematon nieznany
nieznana brakdanych neznámý neznámá bilinmiyor ismeretlen necunoscut άγνωστο άγνωστος
неизвестно неизвестен неизвестный неизвестная невідомо нет 未知 不明 不详 不詳 无 無 미상 مجهول
"""
MISSING = {"", *map(_word, WORDS.split())}
FAR_MORE = 5  # times what others have on average


def require_named(
    where: str,
    what: str,
    owners: Iterable[str | int | float],
) -> None:
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
    counts = Counter(owners)
    plain = {name: _plain(str(name)) for name in counts}
    numbers = [float(text) for text in plain.values() if text.isdecimal()]
    is_counted = max(numbers, default=0.0) <= 10 * len(counts)
    are_letters = all(len(text) == 1 for text in plain.values())
    for name, text in plain.items():
        if _means_missing(text, is_counted, are_letters):
            raise UserError(
                f"{where}: {what} {name!r} stands for a missing one, and its examples would count "
                f"as those of one {what}. Leave them out, or name the {what} of each."
            )
    require_one_spelling(where, what, [name for name in counts if isinstance(name, str)])
    ((largest, examples),) = counts.most_common(1)
    is_code = re.fullmatch(r"\D*(0+|9+|8{2,})?", plain[largest])  # or all letters
    others = counts.total() - examples
    if is_code and examples * (len(counts) - 1) > FAR_MORE * others > 0:
        log.warning(
            "%s: %s %r has far more examples than any other; if that stands for a missing one, "
            "leave them out, or name the %s of each",
            where,
            what,
            largest,
            what,
        )


def _means_missing(
    text: str,
    is_counted: bool,
    are_letters: bool,
) -> bool:
    """True if a plain name means that the owner is not known.

    Args:
        is_counted: owners' numbers are so small that they may count from 0.
        are_letters: all names have one letter.
    """
    word = _word(text)
    is_filler = re.fullmatch("x+|0{2,}", word) is not None
    is_negative = re.fullmatch(r"-\d+(\.\d+)?", text) is not None
    is_zero = text == "0"
    return (
        word in MISSING
        or is_negative
        or (is_filler and not are_letters)
        or (is_zero and not is_counted)
    )


# Letters and marks by Unicode's categories that nobody sees.
UNSEEN = re.compile(
    r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
NUMBER = re.compile(r"\+?\d+(\.\d*)?(e\+\d{1,2})?")


def _plain(name: str) -> str:
    """Return what names of one owner have in common: 'P 007' -> 'p7', '1e+05' -> '100000'.

    Names of one length, as codes have, stay apart if they differ in a letter or digit.
    """
    text = unicodedata.normalize("NFKC", name).casefold()
    text = unicodedata.normalize("NFKC", text)
    text = "".join(letter for letter in text if letter.isprintable() and letter != " ")
    text = UNSEEN.sub("", text).strip("'\"")
    if NUMBER.fullmatch(text):
        text = format(Decimal(text), "f")  # exact, however many digits
        return text.rstrip("0").rstrip(".") if "." in text else text
    text = re.sub(r"^([^\d.,]*\d+)\.0*$", r"\1", text)
    return re.sub(r"^([^\d.,]*)0+(?=\d)", r"\1", text)
