"""The same judgement as a function, which `megarl serve-reward` serves."""


def right(sample):
    """1 if the response is the answer."""
    return float(sample.response_text.strip() == sample.row["answer"])
