"""Small routers by the rules of those that read KV events: what they learn, and where they place a prompt.

Each names blocks in its own way, and takes from the messages what it needs for that: vLLM's names, or tokens, from
which llm-d, as Dynamo, computes names of its own.
"""

import msgspec

FNV_OFFSET, FNV_PRIME, MASK = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1


def fnv(data: bytes) -> int:
    """64-bit FNV-1a."""
    found = FNV_OFFSET
    for byte in data:
        found = ((found ^ byte) * FNV_PRIME) & MASK
    return found


def head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major | number])
    size = next(size for size in (1, 2, 4, 8) if number < 1 << 8 * size)
    return bytes([major | 24 + size.bit_length() - 1]) + number.to_bytes(size, "big")


def cbor(value) -> bytes:
    """Canonical CBOR of numbers, lists, text and nothing."""
    if isinstance(value, list):
        return head(0x80, len(value)) + b"".join(map(cbor, value))
    if isinstance(value, str):
        return head(0x60, len(value)) + value.encode()
    return b"\xf6" if value is None else head(0x00, value)


class LlmdIndex:
    """As llm-d (pkg/kvevents/pool.go, pkg/kvcache/kvblock/token_processor.go): FNV-64a over [parent, tokens, extra]."""

    def __init__(self, block=16, seed=""):
        self.block, self.seed = block, seed
        self.requests: dict[int, int] = {}
        self.pods: dict[int, set[str]] = {}

    def keys(self, model, tokens, parent=None):
        key = fnv(cbor([fnv(self.seed.encode()), None, model])) if parent is None else parent
        found = []
        for first in range(0, len(tokens) - self.block + 1, self.block):
            key = fnv(cbor([key, list(tokens[first : first + self.block]), None]))
            found.append(key)
        return found

    def take(self, topic, payload):
        _, pod, model = topic.decode().split("@")
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "BlockStored":
                parent = event["parent_block_hash"]
                if parent is not None and parent not in self.requests:
                    continue
                start = None if parent is None else self.requests[parent]
                keys = self.keys(model, event["token_ids"], start)
                for name, key in zip(event["block_hashes"], keys, strict=True):
                    self.requests[name] = key
                    self.pods.setdefault(key, set()).add(pod)
            elif event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    self.pods.get(self.requests.get(name), set()).discard(pod)
            else:
                for held in self.pods.values():
                    held.discard(pod)

    def place(self, model, tokens):
        """Pods by the number of blocks that each has of a prompt's beginning."""
        score: dict[str, int] = {}
        alive = None
        for key in self.keys(model, tokens):
            alive = self.pods.get(key, set()) if alive is None else alive & self.pods.get(key, set())
            for pod in alive:
                score[pod] = score.get(pod, 0) + 1
        return score


class NamedIndex:
    """As one that knows vLLM's names of a prompt's blocks: by those alone."""

    def __init__(self):
        self.held: dict[str, set[int]] = {}

    def take(self, topic, payload):
        held = self.held.setdefault(topic.decode(), set())
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            if event["type"] == "BlockStored":
                held.update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                held.difference_update(event["block_hashes"])
            else:
                held.clear()

    def place(self, names):
        found = {}
        for topic, held in self.held.items():
            found[topic] = next((at for at, name in enumerate(names) if name not in held), len(names))
        return found
