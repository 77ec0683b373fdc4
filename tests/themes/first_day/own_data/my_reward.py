"""My reward: whole for the right sum, a part for one that is near."""


def right_sum(sample, near=0.0):
    """1 for the right number, `near` for one that is off by one, else 0."""
    text = sample.response_text.strip()
    if not text.isdigit():
        return 0.0
    off = abs(int(text) - int(sample.row["answer"]))
    return {0: 1.0, 1: near}.get(off, 0.0)
