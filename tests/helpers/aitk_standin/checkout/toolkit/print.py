def print_acc(*words):
    print(*words)
