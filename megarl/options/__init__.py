"""Options: a folder each, which can be deleted with its line in `megarl/option_list.py`. Nothing outside imports them."""

import megarl.config  # noqa: F401 - before any option: it reads their sections, and one that is being imported has none yet
