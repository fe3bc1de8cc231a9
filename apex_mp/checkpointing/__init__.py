"""What reads files of old eras and of other libraries, behind `checkpoint` and `convert`."""
