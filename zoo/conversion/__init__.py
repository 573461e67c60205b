"""What helps a conversion: inspection, calibration, sensitivity, distillation and predicted times."""
