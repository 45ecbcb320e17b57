#pragma once

#include <cstdint>

/// The structures of DLPack 1.3's C exchange API, which reads another library's arrays from C. They
/// are declared here after its stable ABI: https://dmlc.github.io/dlpack/latest/c_api.html
namespace datastates::python::dlpack {

struct Version {
    std::uint32_t major;
    std::uint32_t minor;
};

struct Device {
    std::int32_t type;
    std::int32_t id;
};

struct DataType {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
};

struct Tensor {
    void* data;
    Device device;
    std::int32_t ndim;
    DataType dtype;
    std::int64_t* shape;
    std::int64_t* strides;  // in elements
    std::uint64_t byte_offset;
};

struct ExchangeApi {
    Version version;
    const void* previous_api;
    const void* managed_tensor_allocator;
    const void* managed_tensor_from_py_object_no_sync;
    const void* managed_tensor_to_py_object_no_sync;
    /// Fills a Tensor that is valid as long as the object. Returns 0, or sets a Python error. Needs
    /// the GIL. May be null.
    int (*tensor_from_py_object_no_sync)(void* object, Tensor* tensor);
    const void* current_work_stream;
};

/// The attribute of an array's type that holds the API's capsule, and the name of the capsule.
constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
constexpr const char* kCapsule = "dlpack_exchange_api";
constexpr std::uint32_t kMajor = 1;

}  // namespace datastates::python::dlpack
