"""Check owners' names: reject placeholders for a missing name, and two spellings of one name."""

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
    """Reject the owner names of a data set if one is missing, repeated or spelt in two ways.

    Otherwise an owner with two names would count as two owners, and different owners without a name
    as one, so that ε would not hold for them. Names that are file names need only be distinct, and
    so do those of volumes, which are file names without their suffixes.

    Args:
        what: what owners are, in one word.
        names: name of each owner.

    Raises:
        UserError: A name is repeated, or `require_named` rejects the names.
    """
    if not names:
        return
    ((name, times),) = Counter(names).most_common(1)
    if times > 1:
        raise UserError(
            f"dataset: {what} {name!r} has {times} numbers in `groups`, and would count as "
            f"{times}; give each {what} one number."
        )
    identifiers = [name for name in names if not FILE_NAME.fullmatch(name)]
    if identifiers and what != "volume":
        require_named("dataset", what, identifiers)


def require_one_spelling(
    where: str,
    what: str,
    names: Iterable[str],
) -> None:
    """Reject names that differ only in spelling, because each would count as another owner.

    Spellings differ in letter case, spaces, invisible characters, Unicode form, quotes, zeros
    before the first number, or the form of a number, such as pandas' `7.0` and `1e+05`.

    Args:
        where: file or setting that the names come from, for the error.
        what: what owners are, in one word.
        names: the names, which may repeat.

    Raises:
        UserError: Two names are spellings of the same one.
    """
    first_spelling: dict[str, str] = {}
    for name in sorted(names):
        other = first_spelling.setdefault(_plain(name), name)
        if other != name:
            raise UserError(
                f"{where}: {what} {other!r} and {what} {name!r} differ only in case, spaces, zeros "
                f"or Unicode form, and would count as two; write every {what} in one way."
            )


def _word(text: str) -> str:
    """Return a name without signs, spaces and accents: 'N/A' -> 'na', 'okänd' -> 'okand'."""
    return re.sub(r"[\W_]", "", unicodedata.normalize("NFKD", text.casefold()))


# Words that tables contain if an owner is not known.
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

MAX_RATIO = 5  # examples of one owner, relative to the average of the others, without a warning


def require_named(
    where: str,
    what: str,
    owners: Iterable[str | int | float],
) -> None:
    """Reject a placeholder for a missing owner, because different owners would count as one.

    Placeholders are an empty name, a name without letters or digits, a word such as 'nan' or
    'unbekannt', 'xxx' (and 'x', unless all names are single letters), '000-0', a negative number,
    and 0 beside numbers so large that owners are not simply counted from 0. A code that may be a
    placeholder, such as '0', 'P999' or a word, causes a warning if it has far more examples than
    the others.

    Args:
        where: file or setting that the names come from, for the error.
        what: what owners are, in one word.
        owners: owner of each example.

    Raises:
        UserError: A name is a placeholder, or two names differ only in spelling.
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
    if is_code and examples * (len(counts) - 1) > MAX_RATIO * others > 0:
        log.warning(
            "%s: %s %r has far more examples than the others; if that stands for a missing one, "
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
    """Return True if a plain name is a placeholder for an unknown owner.

    Args:
        text: the name, normalised by `_plain`.
        is_counted: owners' numbers are small enough to be a count from 0.
        are_letters: all names are single characters.
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


# Characters that are invisible, although Unicode's categories count them as letters or marks
INVISIBLE = re.compile(
    r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
NUMBER = re.compile(r"\+?\d+(\.\d*)?(e\+\d{1,2})?")


def _plain(name: str) -> str:
    """Return the normal form of all spellings of a name: 'P 007' -> 'p7', '1e+05' -> '100000'.

    Two codes of the same length that differ in a letter or digit have different normal forms.
    """
    text = unicodedata.normalize("NFKC", name).casefold()
    text = unicodedata.normalize("NFKC", text)  # casefolding may undo the normal form
    text = "".join(letter for letter in text if letter.isprintable() and letter != " ")
    text = INVISIBLE.sub("", text).strip("'\"")
    if NUMBER.fullmatch(text):
        text = format(Decimal(text), "f")  # exact for any number of digits
        # A code such as 3.10 (site and patient) is another than 3.1.
        return re.sub(r"\.0*$", "", text)
    text = re.sub(r"^([^\d.,]*\d+)\.0*$", r"\1", text)
    return re.sub(r"^([^\d.,]*)0+(?=\d)", r"\1", text)


# Words for an owner in the name of a table's column.
OWNERS = "patient|paciente|paziente|participant|subject|subj|person|individual|owner|donor"
OWNERS += "|volunteer|proband|versuchsperson|teilnehmer|speaker|animal"
# Words that stand for an owner only before an identifier: a column `case` may well say case or
# control, and `use_case_name` names no case of a patient.
WEAK_OWNERS = "case|fall|pat|pt|p|lesion|user|client"
IDENTIFIERS = "ids?|idx|identifier|identification|identity|no|nr|nbr|num|number|nummer|nummern"
IDENTIFIERS += "|numero|kennung|name|nombre|code|codigo|key|hash|uid|uuid|guid|ref|pseudonym|index"
IDENTIFIERS += "|seq|dir"
# Words that say which name of an owner it is.
QUALIFIERS = "anon|anonymous|anonymi[sz]ed|pseudo|deid|deidentified|hashed|masked|encoded"
QUALIFIERS += "|study|trial|research|hospital|internal|external|local|global|unique|original|orig"
QUALIFIERS += r"|full|site|hosp|clinic|centre|center|source|cohort|\d+"

OWNER = re.compile(f"({OWNERS})(s|en|in)?")
SINGLE_OWNER = re.compile(OWNERS)
IDENTIFIER = re.compile(IDENTIFIERS)
QUALIFIER = re.compile(QUALIFIERS)
# `hospitalpatientid`, but not `outpatientnumber`, whose patient is a kind of visit.
OWNER_WITH_IDENTIFIER = re.compile(
    f"(?!(in|out)patient)(.*({OWNERS})(s|en|in)?|{WEAK_OWNERS})({IDENTIFIERS})+"
    f"|(mrn|eid|pseudonym)({IDENTIFIERS})*"
)


def may_name_owners(column: str) -> bool:
    """Return True if the name of a table's column suggests that it names the owners of the lines.

    The name may have more words, as `hospital_patient_id`, `study_patient` and `PatientID (anon)`.
    Names of facts about owners, such as `patient_age` and `native_speaker`, do not suggest it.
    """
    words = [word for word in _split_words(column) if not QUALIFIER.fullmatch(word)]
    if not words:
        return False
    *others, last = words
    if any(map(OWNER_WITH_IDENTIFIER.fullmatch, ["".join(words), last])):
        return True
    if others:  # `id_patient` names owners, but `native_speaker` and `num_patients` do not
        are_identifiers = all(IDENTIFIER.fullmatch(word) for word in others)
        return are_identifiers and SINGLE_OWNER.fullmatch(last) is not None
    return OWNER.fullmatch(last) is not None


def _split_words(name: str) -> list[str]:
    """Return the words of a name in lower case: 'PatientID (anon)' -> ['patient', 'id', 'anon']."""
    parted = re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    words = map(_word, re.split(r"[\W_]+", parted))
    return [word for word in words if word]
