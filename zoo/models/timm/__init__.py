"""timm: model classes, attention layers, registered names, and model files."""
