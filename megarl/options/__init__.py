"""Options: a folder each, which can be deleted with its line in `megarl/option_list.py`. Nothing outside imports them."""
