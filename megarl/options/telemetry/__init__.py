"""Trackers, Prometheus and OpenTelemetry: `trackers`."""
