LINEAR_MODULES = ["Linear", "OstrisLinear"]
