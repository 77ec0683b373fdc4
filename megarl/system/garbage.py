"""Python's garbage collector in a process that has hundreds of thousands of objects at once, as a step's requests are."""

import gc


def collect_rarely() -> None:
    """Spare what lives now from all collections, and collect a thirtieth as often as Python does.

    Each collection walks what was made since the last ones: at Python's 700 objects that is most of the scheduler's
    CPU seconds (`benchmarks/scheduling.py`). What is garbage in circles waits for 20,000 objects.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
