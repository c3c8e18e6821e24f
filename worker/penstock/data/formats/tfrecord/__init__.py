"""TFRecord files of TensorFlow, read without TensorFlow."""
