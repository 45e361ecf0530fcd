"""What a user may leave out: export, TensorBoard's extras, speed, signals."""
