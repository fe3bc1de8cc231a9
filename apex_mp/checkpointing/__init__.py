"""Read files of old eras and of other libraries, for `checkpoint` and `convert`."""
