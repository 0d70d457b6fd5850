"""Which worker gets a question."""

from __future__ import annotations

from pmstore.scale._messages import Tag
from pmstore.scale._routes import Routes

TAG, NEXT = Tag("run", 1, 0), Tag("run", 1, 1)


def test_a_worker_has_neighbouring_shards() -> None:
    routes = Routes("abc", 7, {"a": 9, "b": 0, "c": 0}.__getitem__)
    for tag in (TAG, NEXT):
        assert [routes.choose((i, tag)) for i in range(7)] == [(place, 0) for place in "aaabbcc"]


def test_a_question_goes_to_all_others_before_it_comes_to_a_place_again() -> None:
    load = {"a": 0, "b": 2, "c": 1, "d": 3}
    routes = Routes("abcd", 8, load.__getitem__)
    assert [routes.choose((0, TAG)) for _ in range(4)] == [(place, 0) for place in "acbd"]
    assert [routes.choose((0, TAG)) for _ in range(2)] == [("a", 1), ("a", 2)]
    assert routes.answered((0, TAG)) == list("acbdaa")
    assert routes.answered((0, TAG)) == []


def test_a_late_place_gets_nothing_until_it_answers() -> None:
    load = {"a": 0, "b": 2, "c": 1}
    routes = Routes("abc", 6, load.__getitem__)
    assert routes.choose((0, TAG)) == ("a", 0)
    assert routes.choose((0, TAG)) == ("c", 0)  # in the stead of a
    assert routes.choose((1, TAG)) == ("c", 0)
    assert routes.choose((1, TAG)) == ("b", 0)  # and of c
    assert [routes.choose((i, TAG)) for i in (3, 4)] == [("b", 0)] * 2
    for place in "cca":
        routes.on_time(place)
    assert [routes.choose((i, TAG)) for i in (5, 1)] == [("c", 0), ("a", 0)]  # b and c are late for shard 1 now
    assert [routes.choose((i, NEXT)) for i in range(6)] == [("a", 0)] * 6
    for _ in range(2):
        routes.late("a")
    for place in "bca":
        routes.on_time(place)
    again = Tag("run", 1, 2)
    assert [routes.choose((i, again)) for i in range(6)] == [(place, 0) for place in "aabbcc"]


def test_a_question_of_an_epoch_that_ended_is_new() -> None:
    routes = Routes("ab", 2, {"a": 0, "b": 0}.__getitem__)
    assert [routes.choose((1, tag))[0] for tag in (TAG, NEXT)] == ["b", "b"]
    routes.drop(TAG)
    assert routes.answered((1, TAG)) == [] and routes.answered((1, NEXT)) == ["b"]


def test_where_all_are_late_the_home_is_asked() -> None:
    routes = Routes("ab", 2, {"a": 0, "b": 0}.__getitem__)
    routes.late("a")
    routes.late("b")
    assert [routes.choose((i, TAG)) for i in (0, 1, 1)] == [("a", 0), ("b", 0), ("b", 1)]
