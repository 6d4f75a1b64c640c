// Copies host rows to device rows, as listed in two arrays. One warp copies one row of `units` x 16 bytes.

typedef long long i64;

extern "C" __global__ void __launch_bounds__(128) bare_gather(
    const i64 *host_rows, const i64 *device_rows, i64 count, const uint4 *host, uint4 *device, i64 units) {
    const i64 row = (blockIdx.x * 128 + threadIdx.x) / 32;
    if (row >= count) return;
    const uint4 *source = host + host_rows[row] * units;
    uint4 *target = device + device_rows[row] * units;
    uint4 values[3];  // enough for rows of up to 1536 bytes
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const int unit = i * 32 + threadIdx.x % 32;
        if (unit < units) values[i] = source[unit];
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const int unit = i * 32 + threadIdx.x % 32;
        if (unit < units) target[unit] = values[i];
    }
}
