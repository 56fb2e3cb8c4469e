"""A publisher and its readers over ZeroMQ: late readers, lost batches, restarts, and peers that mean no good."""

import contextlib
import threading
import time

import msgspec
import pytest
import structlog
import zmq

from kvabr.telemetry.kv_events import publisher as publishers
from kvabr.telemetry.kv_events.announced import AnnouncedAssets, AnnouncedPrompt
from kvabr.telemetry.kv_events.buffer import ReplayBuffer
from kvabr.telemetry.kv_events.hashes import BlockHashes
from kvabr.telemetry.kv_events.publisher import EventSockets, KVEventMetrics, KVEventPublisher, check_endpoint
from kvabr.telemetry.kv_events.subscriber import KVEventSubscriber
from kvabr.telemetry.kv_events.wire import END, encoded, sequence_frame
from kvabr.types.errors import TransportError, UsageError
from kvabr_lab.route import HeldPrefixes, PrefixHolder
from tests.processes import LIMIT_S

LOG = structlog.get_logger()
ME = PrefixHolder("p", "kv@kvabr@m")
PROMPT = tuple(range(100))
SHORT, OTHER = PROMPT[:40], (1, *PROMPT)


class Store:
    def __init__(self, folder):
        self.sockets = EventSockets(f"ipc://{folder}/e", f"ipc://{folder}/r")
        self.prompts, self.metrics = {}, KVEventMetrics()

    def publisher(self, **more):
        told = AnnouncedAssets(BlockHashes(16), lambda tokens: AnnouncedPrompt("m", "a" * 64, tokens))
        return KVEventPublisher(self.sockets, told, lambda: dict(self.prompts), LOG, self.metrics, **more)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


class Reader:
    def __init__(self, sockets, **more):
        self.held, self.forgotten, self.batches = HeldPrefixes(), [], 0
        self._changed = threading.Condition()
        self.subscriber = KVEventSubscriber(sockets, self._on_events, self._forget, LOG, **more)

    def _on_events(self, topic, events):
        with self._changed:
            self.batches += 1
            self.held.apply(PrefixHolder("p", topic), events)
            self._changed.notify_all()

    def _forget(self, why):
        with self._changed:
            self.forgotten.append(why)
            self.held.forget("p")
            self._changed.notify_all()

    def wait(self, what):
        with self._changed:
            assert self._changed.wait_for(what, LIMIT_S), (self.held.cached(PROMPT), self.forgotten)

    def wait_for(self, cached, prompt=PROMPT):
        self.wait(lambda: self.held.cached(prompt).get(ME, 0) == cached)

    def __enter__(self):
        self.subscriber.__enter__()
        return self

    def __exit__(self, *_):
        self.subscriber.__exit__()


def test_readers_early_and_late_know_what_is_there(store):
    store.prompts["a"] = PROMPT[:40]
    with Reader(store.sockets) as early, store.publisher() as publisher:
        early.wait_for(32)
        store.prompts["b"] = PROMPT
        publisher.changed()
        early.wait_for(96)
        with Reader(EventSockets(store.sockets.endpoint)) as late:  # who cannot ask is told all the same
            late.wait_for(96)
            del store.prompts["b"]
            publisher.changed()
            for reader in (early, late):
                reader.wait_for(32)
                assert not reader.forgotten
    assert store.metrics.value("kvabr_kv_events_assets") == 1


def test_what_a_replay_no_longer_has_is_told_again(store, monkeypatch):
    monkeypatch.setattr(publishers, "_RECONNECT_S", 0.0)  # a publisher that has run for a while
    store.prompts["a"] = PROMPT[:40]
    with Reader(store.sockets) as reader, store.publisher(buffer=ReplayBuffer(10, max_batches=1)) as publisher:
        reader.wait_for(32)
        for number in range(20):  # more than is kept
            store.prompts[f"b{number}"] = (7, *PROMPT[:30], number)
            publisher.changed()
            reader.wait_for(16, (7, *PROMPT[:30]))
        with context() as made, made.socket(zmq.DEALER) as asking:
            asking.connect(store.sockets.replay)
            answers = ask(asking, 3)
        assert msgspec.msgpack.decode(answers[0][-1])[1] == [{"type": "AllBlocksCleared"}]
        numbers = [int.from_bytes(answer[-2], "big") for answer in answers]
        assert numbers[1] == numbers[0] + 1
        assert store.metrics.value("kvabr_kv_events_replays_total", result="gone") > 0
        with Reader(store.sockets) as late:
            late.wait_for(32)


@contextlib.contextmanager
def context():
    made = zmq.Context()
    try:
        yield made
    finally:
        made.destroy(linger=0)


def ask(sock, number):
    sock.send_multipart((b"", number if isinstance(number, bytes) else sequence_frame(number)))
    answers = []
    while True:
        assert sock.poll(1e3 * LIMIT_S)
        answer = sock.recv_multipart()
        if answer[-2] == END:
            return answers
        answers.append(answer)


def test_requests_that_are_none_get_no_answer_and_hold_up_nobody(store):
    store.prompts["a"] = PROMPT
    with store.publisher() as publisher, context() as made:
        with made.socket(zmq.DEALER) as bad:
            bad.connect(publisher.replay)
            for frames in ((b"",), (b"", b"x"), (b"", b"", b"", b""), (b"x" * 5000,)):
                bad.send_multipart(frames)
            with made.socket(zmq.DEALER) as good:
                good.connect(publisher.replay)
                end_s = time.monotonic() + LIMIT_S
                while len(ask(good, 0)) < 2:  # cleared, and what is there
                    assert time.monotonic() < end_s
                assert ask(good, b"\xff" * 8) == []
            assert not bad.poll(0)
        with made.socket(zmq.SUB) as sub:
            sub.connect(publisher.endpoint)
            sub.subscribe(b"x" * 5000)  # longer than what is read of anybody
        with Reader(store.sockets) as reader:
            reader.wait_for(96)


def test_a_peer_that_asks_and_does_not_read_fills_no_memory(store, monkeypatch):
    monkeypatch.setattr(publishers, "_REPLAY_EVERY_S", 0.0)
    monkeypatch.setattr(publishers, "_MAX_WAITING", 10)
    buffer = ReplayBuffer(1, max_batches=10)
    for _ in range(10):
        buffer.add(b"t", bytes(1 << 16))
    with store.publisher(buffer=buffer) as publisher, context() as made, made.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.RCVHWM, 1)
        peer.connect(publisher.replay)
        for _ in range(100):
            peer.send_multipart((b"", sequence_frame(1)))
        end_s = time.monotonic() + LIMIT_S
        while store.metrics.value("kvabr_kv_events_replays_total", result="complete") < 100:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        got = 0
        while peer.poll(1000):
            peer.recv_multipart()
            got += 1
        assert 10 < got < 200  # of 1,100: an answer, and what was on its way
        assert ask(peer, 11) == []


class Hostile:
    """A publisher that says what a test wants, and answers replays so, or not at all."""

    def __init__(self, made, sockets):
        self.pub, self.router = made.socket(zmq.XPUB), made.socket(zmq.ROUTER)
        self.pub.bind(sockets.endpoint)
        self.router.bind(sockets.replay)
        self.told = AnnouncedAssets(BlockHashes(16), lambda tokens: AnnouncedPrompt("m", "a" * 64, tokens))

    def events(self, **prompts):
        return [event for _, events in self.told.changes(prompts) for event in events]

    def say(self, number, payload, topic=b"kv@kvabr@m", *more):
        self.pub.send_multipart(
            (topic, number if isinstance(number, bytes) else sequence_frame(number), payload, *more)
        )

    def begin(self):
        """Wait for a subscriber, which asks for what came before, and say that there is nothing."""
        assert self.pub.poll(1e3 * LIMIT_S)
        self.pub.recv()
        peer, start = self.asked()
        assert start == 0
        self.router.send_multipart((peer, b"", b"", END, b""))

    def asked(self):
        assert self.router.poll(1e3 * LIMIT_S)
        peer, _, start = self.router.recv_multipart()
        return peer, int.from_bytes(start, "big")


def test_a_gap_that_is_not_answered_is_forgotten_and_messages_that_are_none_are_refused(store):
    with context() as made, Reader(store.sockets, replay_s=1.0) as reader:
        other = Hostile(made, store.sockets)
        other.begin()
        other.say(0, encoded(other.events(a=SHORT), 1.0))
        reader.wait_for(32)
        other.say(1, b"\xc1")
        other.say(b"short", b"")
        other.say(1, b"", b"t" * 2000)
        other.say(1, b"", b"kv@kvabr@m", b"more")
        other.say(2, encoded(other.events(a=SHORT, b=OTHER), 1.0))
        assert other.asked()[1] == 1
        reader.wait(lambda: bool(reader.forgotten))  # nobody answers
        reader.wait_for(96, OTHER)
        assert reader.held.cached(PROMPT) == {}
        assert reader.subscriber.refused == 4


def test_addresses_that_cannot_be_bound_and_endpoints_that_are_none(store, tmp_path):
    told = AnnouncedAssets(BlockHashes(16), lambda tokens: AnnouncedPrompt("m", "a" * 64, tokens))

    def bind(*endpoints):
        return KVEventPublisher(EventSockets(*endpoints), told, dict, LOG)

    with bind("tcp://127.0.0.1:0") as publisher:
        with pytest.raises(TransportError, match="in use"):
            bind(publisher.endpoint)
        with pytest.raises(TransportError, match="in use"):
            bind("tcp://127.0.0.1:0", publisher.endpoint)
    with pytest.raises(TransportError, match="cannot be bound"):
        bind(f"ipc://{tmp_path}/nowhere/x")
    wrong = ("", "tcp://", "tcp://x", "tcp://x:", "tcp://x:99999", "tcp://x:1/y", "udp://x:1", "ipc://", "ipc://\udcff")
    for text in (*wrong, "ipc://" + "x" * 200):
        with pytest.raises(UsageError, match="such as tcp://"):
            check_endpoint(text, "--kv-events")


def test_what_goes_while_everything_is_told_again_is_told_in_the_order_in_which_it_went(store):
    """The removal of an asset must not overtake the batch in which it is told again."""
    store.prompts = {str(number): (number, *PROMPT[:47]) for number in range(50)}
    last = store.prompts["49"]
    reading, go_on = threading.Event(), threading.Event()

    def read(tokens):
        if tokens is last and reading.is_set():
            go_on.wait(LIMIT_S)  # it is told again, and goes at that moment
        return AnnouncedPrompt("m", "a" * 64, tokens)

    told = AnnouncedAssets(BlockHashes(16), read)
    publisher = KVEventPublisher(store.sockets, told, lambda: dict(store.prompts), LOG, store.metrics)
    with publisher, Reader(store.sockets) as early:
        early.wait_for(48, last)
        reading.set()
        with Reader(EventSockets(store.sockets.endpoint)) as late:
            del store.prompts["49"]
            publisher.changed()
            go_on.set()
            for reader in (early, late):
                reader.wait_for(0, last)
                reader.wait_for(48, store.prompts["48"])
            publisher.changed()
            early.wait_for(0, last)
