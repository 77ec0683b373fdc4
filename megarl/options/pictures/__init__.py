"""Models that see: pictures and videos of rows, the vision tower, families, and what engines are asked with pictures."""
