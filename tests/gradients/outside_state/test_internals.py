"""What only Python changes, in C, stays as it is, because Python could crash otherwise."""

from __future__ import annotations

import functools
import gc
import itertools
import threading
import weakref
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.gradients.outside_state.holders import InAClass, Owner
from zdp_bench.errors import UserError
from zdp_bench.gradients.outside_state import preserve_outside_state


@pytest.mark.parametrize("maxsize", [0, 1, 2, 128, None])
def test_a_cache_agrees_with_its_own_dictionary(maxsize: int | None) -> None:
    table = functools.lru_cache(maxsize)(lambda length: 1.0 / length)
    table(1)
    with preserve_outside_state(table) as restore:
        for length in (2, 3, 1):
            table(length)
        assert not restore()
        own = [part for part in gc.get_referents(table) if type(part) is dict]
        own.remove(table.__dict__)
        assert [len(entries) for entries in own] == [table.cache_info().currsize]
    assert table(1) == 1


@pytest.mark.parametrize("maxsize", [1, 128, None])
@pytest.mark.parametrize("is_filled", [False, True])
def test_what_a_cached_dictionary_holds_is_restored(maxsize: int | None, is_filled: bool) -> None:
    @functools.lru_cache(maxsize)
    def memory() -> dict[str, float]:
        return {}

    if is_filled:
        memory()["first"] = 1.0
    held = dict(memory())
    with preserve_outside_state(memory) as restore:
        memory()["largest"] = 7.0
        assert restore()
        assert memory() == held


def test_a_cycle_keeps_the_items_that_it_counts() -> None:
    cycle = itertools.cycle(iter([1, 2, 3]))
    assert [next(cycle), next(cycle)] == [1, 2]
    with (
        pytest.raises(UserError, match=r"\(cycle\) .* was advanced"),
        preserve_outside_state(cycle),
    ):
        assert [next(cycle) for _ in range(3)] == [3, 1, 2]
    assert [next(cycle), next(cycle)] == [3, 1]


def test_a_sorted_dictionary_keeps_its_order_and_its_items() -> None:
    """Its items were restored, but not the list of its keys, so that it could not be read."""
    table = pytest.importorskip("sortedcontainers").SortedDict({2: "b"})
    with preserve_outside_state(table) as restore:
        table[1] = "a"
        assert restore()
        assert [*table.items()] == [(2, "b")]
        table[3] = "c"
    assert [*table.items()] == [(2, "b")]


def test_what_another_thread_keeps_for_itself_stays() -> None:
    local = threading.local()
    local.largest = 1.0
    with ThreadPoolExecutor(1) as other:
        with preserve_outside_state(local) as restore:
            local.largest = 7.0
            other.submit(setattr, local, "largest", 9.0).result()
            assert restore()
        assert other.submit(getattr, local, "largest").result() == 9
    assert local.largest == 1


def test_a_class_behind_a_read_only_mapping_is_restored_by_its_own_methods() -> None:
    attributes = vars(InAClass)
    with preserve_outside_state(attributes):
        InAClass.largest = 7.0
        assert InAClass().largest == 7  # Python remembers where it found the attribute
    assert InAClass().largest == 0


@pytest.mark.parametrize("kind", [dict, set])
def test_what_has_not_changed_in_a_container_is_there_all_the_time(kind: Any) -> None:
    """Another thread may read the globals of a module, such as a data set's, meanwhile."""

    class Watch(Owner):
        def __del__(self) -> None:
            lengths.append(len(memory))

    lengths: list[int] = []
    memory: Any = kind([("a", 1), ("b", 2)])
    with preserve_outside_state(memory):
        if kind is dict:
            memory["new"] = Watch()
        else:
            memory.add(Watch())
    assert lengths == [2]


def test_the_order_of_a_dictionary_is_restored() -> None:
    memory = {"a": 1, "b": 2}
    with preserve_outside_state(memory) as restore:
        del memory["a"]
        memory.update(new=3, a=1)
        assert restore()
        assert not restore()
    assert list(memory.items()) == [("a", 1), ("b", 2)]


class Link:
    """A link of a library's cache, such as cachetools' TTLCache, whose entries are elsewhere."""

    __module__ = "queue"
    __slots__ = ("following",)

    following: Any


def test_the_slots_of_a_librarys_objects_are_restored_as_its_dictionaries_are() -> None:
    link = Link()
    link.following = link
    with preserve_outside_state(link):
        link.following = Link()
    assert link.following is link


def test_the_factory_of_a_default_dictionary_is_restored() -> None:
    memory: Any = defaultdict(float)
    with preserve_outside_state(memory) as restore:
        memory.default_factory = int
        assert restore()
    assert memory.default_factory is float


def test_an_entry_of_a_weak_dictionary_is_not_restored_without_its_value() -> None:
    owners = [Owner()]
    memory = weakref.WeakValueDictionary(first=owners[0])
    with preserve_outside_state(memory):
        owners.clear()
    assert len(memory) == len([*memory.values()])


def test_a_private_list_in_c_stays_and_what_it_holds_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    private = [[0.0]]
    monkeypatch.setattr(gc, "get_referents", lambda _: [private])
    with preserve_outside_state(Link()) as restore:
        private[0].append(7.0)
        private.append([1.0])
        assert restore()
    assert private == [[0.0], [1.0]]


def test_a_proxy_of_an_object_that_is_gone_holds_nothing() -> None:
    with preserve_outside_state(weakref.proxy(Owner())) as restore:
        assert not restore()
