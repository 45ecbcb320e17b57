#include "tensor_scan.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "dlpack.hpp"

namespace py = pybind11;

namespace datastates::python {
namespace {

/// Clear an error that tells that something is not so. Others are raised: Python may have run
/// meanwhile, say of a TorchFunctionMode, and an interrupt must not be lost.
void clear_error() {
    if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_Exception) == 0)
        throw py::error_already_set();
    PyErr_Clear();
}

/// The exchange API of an array's type; null without one of a known version.
const dlpack::ExchangeApi* api_of(PyTypeObject* type) {
    const auto capsule = py::reinterpret_steal<py::object>(
        PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), dlpack::kAttribute));
    if (!capsule || PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsule) == 0) {
        clear_error();
        return nullptr;
    }
    const auto* api = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule));
    const bool known =
        api->version.major == dlpack::kMajor && api->tensor_from_py_object_no_sync != nullptr;
    return known ? api : nullptr;
}

/// Reads torch's count of changes in place. be_of() sets the type of the arrays that follow.
class Versions {
  public:
    void be_of(PyTypeObject* type) {
        // Call a C getter directly: an attribute lookup each time would take twice as long.
        const bool plain = type->tp_getattro == PyObject_GenericGetAttr;
        descriptor_ = py::reinterpret_steal<py::object>(
            PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name_.ptr()));
        clear_error();
        const bool known =
            plain && descriptor_ && Py_TYPE(descriptor_.ptr()) == &PyGetSetDescr_Type;
        getter_ =
            known ? reinterpret_cast<PyGetSetDescrObject*>(descriptor_.ptr())->d_getset : nullptr;
    }
    /// -1 for arrays without a count: those of other libraries, and torch's inference tensors.
    std::int64_t of(const py::handle& array) const {
        const auto version = py::reinterpret_steal<py::object>(
            getter_ != nullptr ? getter_->get(array.ptr(), getter_->closure)
                               : PyObject_GetAttr(array.ptr(), name_.ptr()));
        const std::int64_t value = version ? PyLong_AsLongLong(version.ptr()) : -1;
        clear_error();
        return value;
    }

  private:
    const py::str name_{"_version"};
    py::object descriptor_;
    const PyGetSetDef* getter_ = nullptr;
};

/// Looks at arrays one after the other, and caches what depends on their type only. An array of a
/// type that is not in `types` is refused, unless `types` is empty.
class Looker {
  public:
    explicit Looker(py::tuple types = py::tuple()) : types_(std::move(types)) {}

    bool look(const py::handle& array, dlpack::Tensor& tensor) {
        PyTypeObject* const type = Py_TYPE(array.ptr());
        if (type != last_) {
            const auto is_it = [&](const py::handle& known) {
                return known.ptr() == reinterpret_cast<PyObject*>(type);
            };
            const bool wanted = types_.empty() || std::ranges::any_of(types_, is_it);
            api_ = wanted ? api_of(type) : nullptr;
            versions_.be_of(type);
            last_ = type;
        }
        if (api_ == nullptr) return false;
        if (api_->tensor_from_py_object_no_sync(array.ptr(), &tensor) == 0) return true;
        clear_error();  // the array cannot be exchanged: no error for the caller
        return false;
    }

    /// The version of the array that look() had last.
    std::int64_t version_of(const py::handle& array) const { return versions_.of(array); }

  private:
    const py::tuple types_;
    Versions versions_;
    const PyTypeObject* last_ = nullptr;
    const dlpack::ExchangeApi* api_ = nullptr;
};

/// Calls a function of one argument without the tuple that pybind11 would make for it.
py::object call(const py::object& function, const py::handle& argument) {
    PyObject* const result = PyObject_CallOneArg(function.ptr(), argument.ptr());
    if (result == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
}

template <typename Word>
py::bytes to_bytes(const std::vector<Word>& words) {
    return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(Word)};
}

/// Words like `known` ones: they take memory of their own only from the first difference on.
class Words {
  public:
    explicit Words(py::bytes known)
        : known_(std::move(known)),
          begin_(reinterpret_cast<const std::int64_t*>(PyBytes_AS_STRING(known_.ptr()))),
          size_(static_cast<std::size_t>(PyBytes_GET_SIZE(known_.ptr())) / sizeof(std::int64_t)) {}

    void push_back(std::int64_t word) {
        if (!differ_ && same_ < size_ && begin_[same_] == word) {
            ++same_;
            return;
        }
        diverge();
        own_.push_back(word);
    }
    void append(const std::int64_t* words, std::int32_t count) {
        for (std::int32_t i = 0; i < count; ++i) push_back(words[i]);
    }
    /// `known` itself if the words are the same.
    py::bytes bytes() {
        if (!differ_ && same_ == size_) return known_;
        diverge();
        return to_bytes(own_);
    }

  private:
    void diverge() {
        if (!differ_) own_.assign(begin_, begin_ + same_);
        differ_ = true;
    }
    const py::bytes known_;
    const std::int64_t* begin_;
    std::size_t size_;
    std::size_t same_ = 0;
    bool differ_ = false;
    std::vector<std::int64_t> own_;
};

std::int64_t address_of(const dlpack::Tensor& tensor) {
    return static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(tensor.data)) +
           static_cast<std::int64_t>(tensor.byte_offset);
}

std::int64_t device_of(const dlpack::Tensor& tensor) {
    return (std::int64_t{tensor.device.type} << 32) | tensor.device.id;
}

std::int64_t elements_of(const dlpack::Tensor& tensor) {
    return (std::int64_t{tensor.dtype.lanes} << 48) | (std::int64_t{tensor.dtype.code} << 40) |
           (std::int64_t{tensor.dtype.bits} << 32);
}

}  // namespace

py::object look(const py::list& arrays, const py::bytes& known, const py::object& memory_of,
                const py::object& is_negated, const py::tuple& plain) {
    Words places(known);
    std::vector<std::int64_t> addresses;
    std::vector<std::int64_t> versions;
    addresses.reserve(arrays.size());
    versions.reserve(arrays.size());
    py::list memory(memory_of.is_none() ? 0 : arrays.size());
    Looker looker(plain);
    for (std::size_t i = 0; i < arrays.size(); ++i) {
        const py::object array = arrays[i];
        dlpack::Tensor tensor{};
        if (!looker.look(array, tensor)) return py::none();
        // Both are called here, while the array is in the processor's cache: half of the time is
        // cache misses.
        if (!is_negated.is_none() && call(is_negated, array).ptr() != Py_False) return py::none();
        if (!memory_of.is_none()) memory[i] = call(memory_of, array);
        addresses.push_back(address_of(tensor));
        versions.push_back(looker.version_of(array));
        places.push_back(
            static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(Py_TYPE(array.ptr()))));
        places.push_back(addresses.back());
        places.push_back(device_of(tensor));
        places.push_back(elements_of(tensor) | tensor.ndim);
        places.append(tensor.shape, tensor.ndim);
        if (tensor.strides == nullptr) continue;  // contiguous
        places.append(tensor.strides, tensor.ndim);
    }
    return py::make_tuple(places.bytes(), to_bytes(addresses), to_bytes(versions), memory);
}

py::object layout(const py::list& arrays, const py::object& is_negated) {
    std::vector<std::int64_t> addresses;
    std::vector<std::int64_t> devices;
    std::vector<std::int64_t> elements;
    std::vector<std::uint8_t> ndim;
    std::vector<std::int64_t> dims;
    std::vector<std::int64_t> strides;
    Looker looker;
    for (const py::handle array : arrays) {
        dlpack::Tensor tensor{};
        if (!looker.look(array, tensor) || tensor.ndim > 255) return py::none();
        if (call(is_negated, array).ptr() != Py_False) return py::none();
        addresses.push_back(address_of(tensor));
        devices.push_back(device_of(tensor));
        elements.push_back(elements_of(tensor));
        ndim.push_back(static_cast<std::uint8_t>(tensor.ndim));
        dims.insert(dims.end(), tensor.shape, tensor.shape + tensor.ndim);
        if (tensor.strides != nullptr) {
            strides.insert(strides.end(), tensor.strides, tensor.strides + tensor.ndim);
            continue;
        }
        strides.resize(dims.size());
        std::int64_t step = 1;  // contiguous
        for (int d = tensor.ndim - 1; d >= 0; --d) {
            strides[dims.size() - static_cast<std::size_t>(tensor.ndim - d)] = step;
            step *= tensor.shape[d];
        }
    }
    return py::make_tuple(to_bytes(addresses), to_bytes(devices), to_bytes(elements),
                          to_bytes(ndim), to_bytes(dims), to_bytes(strides));
}

}  // namespace datastates::python
