"""The reward file of the verl run, unchanged."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the right number."""
    assert data_source == "sums"
    assert isinstance(extra_info["index"], int)
    return float(solution_str.strip() == ground_truth)
