"""Groups in place of waiting requests, and promises to vLLM. Needs no vLLM, no network and no clock."""

import random

from kvabr.engines.vllm.promises import Promises, Terms

BLOCK, GROUP = 8, 16


class Table:
    """Promises of requests that all want 64 tokens by 10 s, one byte each on their only track, if no other is given."""

    def __init__(self, *, ranks=1, max_bytes=1000, max_plays=99, same_ends=False):
        self.promises = Promises(
            ranks=ranks, block=BLOCK, max_bytes=max_bytes, max_plays=max_plays, same_ends=same_ends
        )
        self.promises.link(1e9, 0.01)

    def ask(self, request="a", computed=0, last=64, *, due_s=10.0, now=0.0, tracks=(1,)):
        def terms(first):
            tokens = -(-last // GROUP) * GROUP - first // GROUP * GROUP
            return Terms([tokens * each for each in tracks])

        self.now = now
        return self.promises.promised_tokens(request, computed, last, terms=terms, due_s=due_s, now=now)

    def take(self):
        """Return the plays to begin, those to drop, and how many requests found no room."""
        *news, crowded = self.promises.take(self.now)
        assert not crowded
        return tuple(news)

    def use(self, request, external):
        return self.promises.use(request, external, self.now)

    def report(self, play, end, nbytes=640):
        return self.promises.report(play, end, nbytes)

    def begun(self):
        return [(play.request, play.first, play.last) for play in self.take()[0]]

    def play(self, request="a", **more):
        """Ask, begin, and return the play's number."""
        assert self.ask(request, **more) is None
        (play,) = self.take()[0]
        return play.play


def test_a_request_waits_for_its_play_and_gets_what_is_in_place():
    table = Table()
    play = table.play()
    assert table.ask() is None
    assert table.begun() == []  # once
    table.report(play, 64)
    assert table.ask() == 64
    assert table.ask() == 64  # no blocks were free: vLLM asks again
    assert table.promises.held_bytes == 64
    assert table.use("a", 64) == (play, 0)
    assert table.promises.held_bytes == 0
    assert table.take() == ([], [], 0)


def test_the_worker_with_the_least_counts():
    table = Table(ranks=3)
    play = table.play()
    for end in (64, 32):
        table.report(play, end)
        assert table.ask() is None
    table.report(play, 48)
    assert table.ask() == 32


def test_workers_that_differ_have_nothing_of_use_where_windows_depend_on_the_end():
    for ends, told in [((64, 48), 0), ((48, 48), 48)]:
        table = Table(ranks=2, same_ends=True)
        play = table.play()
        for end in ends:
            table.report(play, end)
        assert table.ask() == told


def test_a_request_without_room_waits_before_those_behind_it():
    table = Table(max_bytes=150)
    first, second = table.play("a"), table.play("b")
    assert table.ask("c") is None
    assert table.ask("d", last=16) is None  # it would fit, but c was first
    assert table.begun() == []
    table.report(first, 64)
    assert table.use("a", 64) is not None
    assert table.ask("d", last=16) is None
    assert table.ask("c") is None
    assert table.ask("d", last=16) is None
    assert table.begun() == [("c", 0, 64), ("d", 0, 16)]
    table.report(second, 64)
    assert table.ask("b") == 64


def test_the_earliest_deadline_goes_first():
    table = Table(max_bytes=100)
    first = table.play("a")
    for request, due_s in [("late", 30.0), ("early", 12.0), ("gone", 11.0), ("middle", 20.0)]:
        assert table.ask(request, due_s=due_s) is None
    table.promises.drop("gone")
    table.report(first, 64)
    for request, due_s in [("early", 12.0), ("middle", 20.0), ("late", 30.0)]:
        table.promises.drop("a")
        for each, own_s in [("late", 30.0), ("middle", 20.0), ("early", 12.0)]:
            if own_s >= due_s:
                assert table.ask(each, due_s=own_s) is None
        assert [name for name, *_ in table.begun()] == [request]
        table.promises.drop(request)


def test_beside_others_a_play_does_without_the_tracks_that_leave_no_room():
    table = Table(max_bytes=1024)
    sizes = []
    for number in range(12):
        assert table.ask(f"r{number}", tracks=(8, 4, 1)) is None
        sizes += [play.bytes for play in table.take()[0]]
    assert sizes == [512, 64, 64, 64, 64, 64, 64, 64, 64]  # a quarter of 512 is less than 256
    assert table.promises.held_bytes == 1024


def test_what_has_come_counts_with_what_it_is():
    table = Table(ranks=2, max_bytes=1024)
    assert table.ask("a", tracks=(8, 1)) is None
    (play,) = table.take()[0]
    table.report(play.play, 64, 100)
    assert table.promises.held_bytes == 512
    table.report(play.play, 64, 120)
    assert table.promises.held_bytes == 120


def test_what_can_only_come_in_part_is_played_if_the_link_is_free():
    table = Table()
    table.promises.link(10.0, 0.01)
    slow = Terms([500], link_bytes=500, played_s=0.1, computed_s=50.0)
    assert table.promises.promised_tokens("a", 0, 64, terms=lambda _: slow, due_s=10.0, now=0.0) is None
    table.now = 0.0
    assert table.begun() == [("a", 0, 64)]


def test_plays_under_way_are_bounded_too():
    table = Table(max_plays=1)
    play = table.play("a")
    assert table.ask("b") is None
    assert table.begun() == []
    table.report(play, 64)
    assert table.ask("b") is None
    assert table.begun() == [("b", 0, 64)]


def test_a_request_that_vllm_does_not_ask_about_holds_nobody_up_beyond_its_deadline():
    table = Table(max_bytes=100)
    play = table.play("held")
    assert table.ask("silent", due_s=1.0) is None
    assert table.ask("b", now=0.5) is None
    table.report(play, 64)
    assert table.use("held", 64) is not None
    assert table.ask("c", now=1.0) is None
    begun, _, unplayed = table.take()
    assert ([play.request for play in begun], unplayed) == (["b"], 1)
    assert table.ask("silent", due_s=1.0, now=2.0) == 0
    assert table.take() == ([], [], 0)  # it was counted


def test_a_cache_that_is_larger_than_the_bound_is_played_alone():
    table = Table(max_bytes=100)
    small = table.play("a", last=16)
    assert table.ask("b", last=640) is None
    assert table.begun() == []
    table.promises.drop("a")
    assert table.ask("b", last=640) is None
    assert table.take()[1] == [small]
    assert table.promises.held_bytes == 640
    assert table.ask("c", last=16) is None
    assert table.begun() == []


def test_one_that_must_be_played_alone_lets_others_go_first_for_half_of_its_deadline():
    table = Table(max_bytes=100)
    table.play("a", last=16)
    assert table.ask("large", last=640, due_s=20.0) is None
    assert table.ask("b", last=16, due_s=30.0) is None
    assert table.begun() == [("b", 0, 16)]
    assert table.ask("c", last=16, due_s=30.0, now=12.0) is None
    assert table.begun() == []


def test_a_worker_that_never_reports_is_not_waited_for():
    table = Table(ranks=2)
    play = table.play()
    table.report(play, 64)
    assert table.ask(now=39.9) is None
    assert table.ask(now=40.0) == 0
    assert table.use("a", 0) is None
    assert table.take() == ([], [play], 0)


def test_whatever_happens_memory_is_bounded_and_nothing_is_left():
    for seed in range(50):
        rng = random.Random(seed)
        table = Table(ranks=2, max_bytes=300)
        promises, now, running, reports = table.promises, 0.0, {}, []
        waiting = {f"r{n}": rng.randrange(1, 12) * 8 for n in range(40)}
        due = {name: rng.uniform(1.0, 30.0) for name in waiting}
        while waiting:
            now += 0.1
            for name, last in list(waiting.items()):
                computed = rng.choice([0, 0, 8, 16])
                told = table.ask(name, computed, last, due_s=due[name], now=now)
                assert told is None or 0 <= told <= max(0, last - computed)
                if told is not None and rng.random() < 0.3:  # vLLM has blocks for it
                    used = promises.use(name, told, now)
                    if told:
                        play, first = used
                        assert running[play] <= first
                        assert first == computed
                    promises.drop(name)
                    del waiting[name]
                elif rng.random() < 0.01:
                    promises.drop(name)
                    del waiting[name]
            assert promises.held_bytes <= 300
            for play in promises.take(now)[0]:
                running[play.play] = play.first
                reports += [(play.play, rng.randrange(play.first, play.last + 1)) for _ in range(2)]
            for report in [each for each in reports if rng.random() < 0.5]:
                reports.remove(report)
                promises.report(*report, 1)
        assert promises.held_bytes == 0
        assert not promises._waiting
        assert not promises._requests
