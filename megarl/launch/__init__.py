"""Getting a run onto machines: what they are (`doctor`), whether they agree, and the batch script that starts it there."""
