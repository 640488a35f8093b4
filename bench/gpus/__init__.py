"""What ``bench.gpu`` is made of."""
