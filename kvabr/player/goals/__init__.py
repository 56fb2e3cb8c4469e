"""The goals of a play, one per module: each decides when the play ends, and delivers its result."""
