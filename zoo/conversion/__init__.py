"""Tools for conversions: inspection, calibration, sensitivity, distillation and predicted times."""
