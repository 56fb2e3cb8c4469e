"""A buffer that counts: parsers must not copy what they hold again and again."""


class CountingBuffer(bytearray):
    """Counts the bytes that are put in, cut out, or moved because others before them were deleted."""

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
