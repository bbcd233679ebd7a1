raise RuntimeError("cannot be imported")
