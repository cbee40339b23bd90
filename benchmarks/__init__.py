"""Measurements, always as ratios of two things run interleaved."""
