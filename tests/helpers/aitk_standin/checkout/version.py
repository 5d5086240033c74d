VERSION = "0.12.26"
IS_NEWER = VERSION >= "0.13"  # then the interface is that of 0.13.19
