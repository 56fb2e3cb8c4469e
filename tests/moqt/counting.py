"""A buffer that counts copied bytes, to show that parsers work in linear time."""


class CountingBuffer(bytearray):
    """Count the bytes that are added, sliced out, or moved by a deletion before them."""

    touched = 0

    def __iadd__(self, data):
        self.touched += len(data)
        return super().__iadd__(data)

    def __getitem__(self, place):
        found = super().__getitem__(place)
        if isinstance(place, slice):
            self.touched += len(found)
        return found

    def __delitem__(self, place):
        before = len(self)
        super().__delitem__(place)
        if len(self) < before:
            self.touched += len(self)
