"""Order of training rows by difficulty, stages, and rows left out for their pass rate: `data.curriculum`."""
