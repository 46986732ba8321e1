// Files as sequences of arrays: their size in bytes as int64, then the bytes.
#pragma once

#include <cstdint>
#include <fstream>
#include <vector>

template <typename T>
std::vector<T> read(std::ifstream& file) {
    int64_t bytes = 0;
    file.read(reinterpret_cast<char*>(&bytes), sizeof(bytes));
    std::vector<T> result(bytes / sizeof(T));
    file.read(reinterpret_cast<char*>(result.data()), bytes);
    return result;
}

template <typename T>
void write(std::ofstream& file, const T* data, int64_t count) {
    const int64_t bytes = count * sizeof(T);
    file.write(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
    file.write(reinterpret_cast<const char*>(data), bytes);
}
