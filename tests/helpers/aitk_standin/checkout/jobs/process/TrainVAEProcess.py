from toolkit.optimizer import get_optimizer


class TrainVAEProcess:
    @staticmethod
    def make_optimizer(params, name):
        return get_optimizer(params, name, 1e-3)
