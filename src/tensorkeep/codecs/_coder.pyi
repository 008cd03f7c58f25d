simd: str
