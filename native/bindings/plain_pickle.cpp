#include "plain_pickle.hpp"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>

#include "arrays.hpp"

namespace py = pybind11;

namespace datastates::python {
namespace {

constexpr std::string_view kOrderedDict = "ccollections\nOrderedDict\n";
constexpr std::string_view kParameter = "ctorch._utils\n_rebuild_parameter\n(";
constexpr std::string_view kParameterTail = "ccollections\nOrderedDict\n)RtR";
constexpr std::string_view kLocation{"X\3\0\0\0cpu", 8};
constexpr char kTrue = '\x88';
constexpr char kFalse = '\x89';
// A pickler writes at least so many bytes for each container, as pickle_reader.py knows. A denser
// stream would take a hundred bytes of memory for each of its own.
constexpr std::size_t kBytesPerContainer = 3;
constexpr std::size_t kFreeContainers = 4096;

void append_little_endian(std::string& to, std::uint64_t value, unsigned bytes) {
    for (unsigned i = 0; i < bytes; ++i) to.push_back(static_cast<char>(value >> (8 * i)));
}

void append_integer(std::string& to, std::uint64_t value) {
    if (value < 256) {
        to.push_back('K');
        append_little_endian(to, value, 1);
    } else if (value < (std::uint64_t{1} << 31)) {
        to.push_back('J');
        append_little_endian(to, value, 4);
    } else {
        const auto bytes = static_cast<unsigned>((std::bit_width(value) / 8) + 1);
        to += {'\x8a', static_cast<char>(bytes)};
        append_little_endian(to, value, std::min(bytes, 8U));
        if (bytes > 8) to.push_back('\0');
    }
}

void append_tuple(std::string& to, std::span<const std::uint64_t> values) {
    to.push_back('(');
    for (const std::uint64_t value : values) append_integer(to, value);
    to.push_back('t');
}

py::object owned(PyObject* made) {
    if (made == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(made);
}

py::object integer(std::int64_t value) { return owned(PyLong_FromLongLong(value)); }

py::object tuple_of(std::span<const std::uint64_t> values) {
    py::object made = owned(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
    for (std::size_t i = 0; i < values.size(); ++i) {
        PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i),
                         owned(PyLong_FromUnsignedLongLong(values[i])).release().ptr());
    }
    return made;
}

/// A pickle machine with only the opcodes that plain values need. A method that returns false
/// leaves the stream to another reader.
class PlainReader {
  public:
    PlainReader(std::string_view data, const ArrayRows& rows, const py::object& reference,
                const py::object& ordered_dict)
        : data_(data), rows_(rows), reference_(reference), ordered_dict_(ordered_dict) {}

    std::optional<py::object> read() {
        while (at_ < data_.size()) {
            if (!step(data_[at_++])) return std::nullopt;
        }
        if (stack_.size() != 1 || !marks_.empty()) return std::nullopt;
        return std::move(stack_.front());
    }

  private:
    bool step(char opcode) {
        switch (opcode) {
            case '(':
                marks_.push_back(stack_.size());
                return true;
            case 'N':
                return push(py::none());
            case kTrue:
                return push(py::bool_(true));
            case kFalse:
                return push(py::bool_(false));
            case 'K':
                return read_integer(1, false);
            case 'M':
                return read_integer(2, false);
            case 'J':
                return read_integer(4, true);
            case '\x8a':
                return read_long();
            case 'G':
                return read_float();
            case 'X':
                return read_text();
            case '}':
                return charge() && push(owned(PyDict_New()));
            case ']':
                return charge() && push(owned(PyList_New(0)));
            case ')':
                return push(owned(PyTuple_New(0)));
            case '\x85':
                return make_tuple(1);
            case '\x86':
                return make_tuple(2);
            case '\x87':
                return make_tuple(3);
            case 't':
                return !marks_.empty() && make_tuple(drop_mark());
            case 'a':
                return available() >= 2 && append(1);
            case 'e':
                return closes_frame() && append(drop_mark());
            case 's':
                return available() >= 3 && set_items(2);
            case 'u':
                return closes_frame() && set_items(drop_mark());
            case 'q':
                return put(1);
            case 'r':
                return put(4);
            case 'h':
                return get(1);
            case 'j':
                return get(4);
            case 'c':
                return read_global();
            case 'R':
                return reduce();
            case 'b':
                return build();
            default:
                return false;
        }
    }

    bool push(py::object value) {
        stack_.push_back(std::move(value));
        return true;
    }

    /// The number of values above the last mark. Opcodes use no values below it.
    std::size_t available() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }

    /// Whether there is a mark and, below it in the same frame, a container for the items.
    bool closes_frame() const {
        if (marks_.empty()) return false;
        const std::size_t below = marks_.size() > 1 ? marks_[marks_.size() - 2] : 0;
        return marks_.back() > below;
    }

    std::size_t drop_mark() {
        const std::size_t count = available();
        marks_.pop_back();
        return count;
    }

    bool has(std::uint64_t bytes) const { return data_.size() - at_ >= bytes; }

    bool take(std::string_view expected) {
        if (!data_.substr(at_).starts_with(expected)) return false;
        at_ += expected.size();
        return true;
    }

    std::optional<std::uint64_t> number(unsigned bytes) {
        if (!has(bytes)) return std::nullopt;
        std::uint64_t value = 0;
        for (unsigned i = 0; i < bytes; ++i) {
            value |= std::uint64_t{static_cast<unsigned char>(data_[at_ + i])} << (8 * i);
        }
        at_ += bytes;
        return value;
    }

    bool read_integer(unsigned bytes, bool is_signed) {
        const auto value = number(bytes);
        if (!value) return false;
        return push(integer(is_signed ? static_cast<std::int32_t>(*value)
                                      : static_cast<std::int64_t>(*value)));
    }

    bool read_long() {
        const auto bytes = number(1);
        if (!bytes || *bytes == 0 || *bytes > 8) return false;
        const auto value = number(static_cast<unsigned>(*bytes));
        if (!value) return false;
        const auto unused = static_cast<unsigned>(64 - (8 * *bytes));
        return push(integer(static_cast<std::int64_t>(*value << unused) >> unused));
    }

    bool read_float() {
        if (!has(8)) return false;
        std::uint64_t bits = 0;
        for (int i = 0; i < 8; ++i) bits = bits << 8 | static_cast<unsigned char>(data_[at_++]);
        return push(owned(PyFloat_FromDouble(std::bit_cast<double>(bits))));
    }

    bool read_text() {
        const auto bytes = number(4);
        if (!bytes || !has(*bytes)) return false;
        PyObject* const text = PyUnicode_DecodeUTF8(
            data_.data() + at_, static_cast<Py_ssize_t>(*bytes), "surrogatepass");
        if (text == nullptr) {
            if (PyErr_ExceptionMatches(PyExc_UnicodeDecodeError) == 0)
                throw py::error_already_set();
            PyErr_Clear();
            return false;
        }
        at_ += *bytes;
        return push(owned(text));
    }

    /// Whether the stream may make one more container.
    bool charge() { return ++containers_ <= kFreeContainers + (at_ / kBytesPerContainer); }

    bool make_tuple(std::size_t count) {
        if (available() < count || !charge()) return false;
        py::object made = owned(PyTuple_New(static_cast<Py_ssize_t>(count)));
        const std::size_t first = stack_.size() - count;
        for (std::size_t i = 0; i < count; ++i) {
            PyTuple_SET_ITEM(made.ptr(), static_cast<Py_ssize_t>(i),
                             stack_[first + i].release().ptr());
        }
        stack_.resize(first);
        return push(std::move(made));
    }

    /// Appends the topmost `count` values to the list below them.
    bool append(std::size_t count) {
        const std::size_t first = stack_.size() - count;
        PyObject* const list = stack_[first - 1].ptr();
        if (PyList_CheckExact(list) == 0) return false;
        for (std::size_t i = first; i < stack_.size(); ++i) {
            if (PyList_Append(list, stack_[i].ptr()) != 0) throw py::error_already_set();
        }
        stack_.resize(first);
        return true;
    }

    /// Puts the topmost `count` keys and values into the mapping below them.
    bool set_items(std::size_t count) {
        const std::size_t first = stack_.size() - count;
        PyObject* const mapping = stack_[first - 1].ptr();
        const bool is_mapping =
            PyDict_CheckExact(mapping) != 0 ||
            Py_TYPE(mapping) == reinterpret_cast<PyTypeObject*>(ordered_dict_.ptr());
        if (!is_mapping || count % 2 != 0) return false;
        for (std::size_t i = first; i < stack_.size(); i += 2) {
            PyObject* const key = stack_[i].ptr();
            // The other reader decides about keys of other types and the cost of hashing them.
            if (PyUnicode_CheckExact(key) == 0 && PyLong_CheckExact(key) == 0) return false;
            if (PyObject_SetItem(mapping, key, stack_[i + 1].ptr()) != 0) {
                throw py::error_already_set();
            }
        }
        stack_.resize(first);
        return true;
    }

    /// Stores the top in the memo. Our writer numbers the slots upwards; other streams are refused.
    bool put(unsigned bytes) {
        const auto slot = number(bytes);
        if (!slot || available() == 0 || *slot != memo_.size()) return false;
        memo_.push_back(stack_.back());
        return true;
    }

    bool get(unsigned bytes) {
        const auto slot = number(bytes);
        return slot && *slot < memo_.size() && push(memo_[static_cast<std::size_t>(*slot)]);
    }

    bool read_global() {
        --at_;
        if (take(kOrderedDict)) return push(ordered_dict_);
        return read_array(take(kParameter));
    }

    bool reduce() {
        if (available() < 2) return false;
        PyObject* const arguments = stack_.back().ptr();
        const bool empty = PyTuple_CheckExact(arguments) != 0 && PyTuple_GET_SIZE(arguments) == 0;
        if (!empty || !stack_[stack_.size() - 2].is(ordered_dict_)) return false;
        stack_.pop_back();
        stack_.back() = owned(PyObject_CallNoArgs(ordered_dict_.ptr()));
        return true;
    }

    /// Sets attributes of an ordered mapping from the dict above it. A module's state_dict() has
    /// such attributes.
    bool build() {
        if (available() < 2) return false;
        const py::object attributes = std::move(stack_.back());
        stack_.pop_back();
        PyObject* const target = stack_.back().ptr();
        const bool ordered =
            Py_TYPE(target) == reinterpret_cast<PyTypeObject*>(ordered_dict_.ptr());
        if (!ordered || PyDict_CheckExact(attributes.ptr()) == 0) return false;
        const py::object own = owned(PyObject_GetAttrString(target, "__dict__"));
        if (PyDict_Update(own.ptr(), attributes.ptr()) != 0) throw py::error_already_set();
        return true;
    }

    std::optional<bool> read_flag() {
        if (!has(1)) return std::nullopt;
        const char flag = data_[at_++];
        if (flag != kTrue && flag != kFalse) return std::nullopt;
        return flag == kTrue;
    }

    /// Reads the next row's array, if its opcodes are exactly those of our writer.
    bool read_array(bool parameter) {
        if (row_ == rows_.dtype.size()) return false;
        const std::size_t i = row_++;
        const ArrayFrame& frame = rows_.frames[rows_.dtype[i]];
        const std::size_t ndim = rows_.ndim[i];
        const auto shape = rows_.dims.subspan(dims_, ndim);
        const auto stride = rows_.strides.subspan(dims_, ndim);
        dims_ += ndim;
        expected_.assign(frame.head);
        const std::string record = std::to_string(rows_.record[i]);
        expected_.push_back('X');
        append_little_endian(expected_, record.size(), 4);
        expected_ += record;
        expected_ += kLocation;
        const std::uint64_t elements = rows_.record_nbytes[i] / frame.itemsize;
        append_integer(expected_, frame.typed ? elements : elements * frame.itemsize);
        expected_ += "tQ";
        append_integer(expected_, rows_.offset[i] / frame.itemsize);
        append_tuple(expected_, shape);
        append_tuple(expected_, stride);
        if (!take(expected_)) return false;
        auto requires_grad = read_flag();
        if (!requires_grad || !take(frame.tail)) return false;
        if (parameter) {
            requires_grad = read_flag();
            if (!requires_grad || !take(kParameterTail)) return false;
        }
        return push(reference(i, tuple_of(shape), tuple_of(stride), *requires_grad, parameter));
    }

    py::object reference(std::size_t i, const py::object& shape, const py::object& stride,
                         bool requires_grad, bool parameter) const {
        PyObject* const arguments[] = {
            PyList_GET_ITEM(rows_.keys.ptr(), static_cast<Py_ssize_t>(i)),
            PyTuple_GET_ITEM(rows_.kinds.ptr(), static_cast<Py_ssize_t>(rows_.kind[i])),
            PyTuple_GET_ITEM(rows_.dtypes.ptr(), static_cast<Py_ssize_t>(rows_.dtype[i])),
            shape.ptr(),
            stride.ptr(),
            requires_grad ? Py_True : Py_False,
            parameter ? Py_True : Py_False,
        };
        return owned(
            PyObject_Vectorcall(reference_.ptr(), arguments, std::size(arguments), nullptr));
    }

    std::string_view data_;
    std::size_t at_ = 0;
    const ArrayRows& rows_;
    std::size_t row_ = 0;
    std::size_t dims_ = 0;
    const py::object& reference_;
    const py::object& ordered_dict_;
    std::vector<py::object> stack_;
    std::vector<std::size_t> marks_;
    std::vector<py::object> memo_;
    std::size_t containers_ = 0;
    std::string expected_;
};

void check(const ArrayRows& rows) {
    const std::size_t count = rows.dtype.size();
    bool good = rows.keys.size() == count && rows.kind.size() == count &&
                rows.record.size() == count && rows.record_nbytes.size() == count &&
                rows.offset.size() == count && rows.ndim.size() == count &&
                rows.dtypes.size() == rows.frames.size();
    std::size_t dims = 0;
    for (std::size_t i = 0; good && i < count; ++i) {
        good = rows.kind[i] < rows.kinds.size() && rows.dtype[i] < rows.frames.size() &&
               rows.frames[rows.dtype[i]].itemsize > 0;
        dims += rows.ndim[i];
    }
    if (!good || rows.dims.size() != dims || rows.strides.size() != dims) {
        throw Error::invalid("the columns of the arrays contradict each other");
    }
}

}  // namespace

py::object read_plain_pickle(const py::bytes& opcodes, const ArrayRows& rows,
                             const py::object& reference, const py::object& ordered_dict) {
    check(rows);
    PlainReader reader(std::string_view(opcodes), rows, reference, ordered_dict);
    const std::optional<py::object> value = reader.read();
    return value ? py::object(py::make_tuple(*value)) : py::object(py::none());
}

}  // namespace datastates::python
