#include "walks.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace datastates::python {
namespace {

// As many levels as a state may have.
constexpr int kDeepest = 1000;

py::object stolen(PyObject* object) {
    if (object == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(object);
}

/// Calls `visit(key, item)` for the items of a dict or OrderedDict, in order, until it returns
/// false. False then, and for other mappings. `visit` must not run code of Python.
template <typename Visit>
bool visit_items(PyObject* mapping, Visit&& visit) {
    if (PyDict_CheckExact(mapping)) {
        PyObject* key = nullptr;
        PyObject* item = nullptr;
        for (Py_ssize_t at = 0; PyDict_Next(mapping, &at, &key, &item) != 0;) {
            if (!visit(key, item)) return false;
        }
        return true;
    }
    if (!PyODict_CheckExact(mapping)) return false;
    // Its order is not the one of the dict that it is made of.
    const py::object keys = stolen(PyObject_GetIter(mapping));
    while (PyObject* const next = PyIter_Next(keys.ptr())) {
        const auto key = py::reinterpret_steal<py::object>(next);
        if (!PyUnicode_CheckExact(next) && !PyLong_CheckExact(next)) return false;
        PyObject* const item = PyDict_GetItemWithError(mapping, next);
        if (item == nullptr || !visit(next, item)) {
            PyErr_Clear();
            return false;
        }
    }
    PyErr_Clear();  // of an OrderedDict that another thread has changed meanwhile
    return true;
}

/// Whether two keys are the same strings or integers.
bool are_same(PyObject* a, PyObject* b) {
    if (a == b) return true;
    if (Py_TYPE(a) != Py_TYPE(b)) return false;
    if (PyUnicode_CheckExact(a)) return PyUnicode_Compare(a, b) == 0;
    return PyLong_CheckExact(a) && PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

/// One walk through a value, which takes it apart.
class Split {
  public:
    bool walk(PyObject* form, PyObject* value, int depth) {
        const auto* const kind = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(form, 0));
        if (Py_TYPE(value) != kind || depth > kDeepest) return false;
        // All items first, because what follows may run code of Python, which may change the value.
        std::vector<py::object> items;
        if (!take_items(PyTuple_GET_ITEM(form, 1), value, items)) return false;
        if (PyODict_CheckExact(value) && !has_attributes(value, PyTuple_GET_ITEM(form, 3))) {
            return false;
        }
        if (!PyTuple_CheckExact(value)) containers_.push_back(value);
        PyObject* const inside = PyTuple_GET_ITEM(form, 2);
        for (std::size_t i = 0; i < items.size(); ++i) {
            PyObject* const what = PyList_CheckExact(inside)
                                       ? PyList_GET_ITEM(inside, static_cast<py::ssize_t>(i))
                                       : inside;
            if (what == Py_None) {
                arrays.append(items[i]);
            } else if (what == Py_True) {
                plain.append(items[i]);
            } else {
                if (!walk(what, items[i].ptr(), depth + 1)) return false;
                kept_.push_back(std::move(items[i]));
            }
        }
        return true;
    }
    bool has_container_twice() {
        std::ranges::sort(containers_);
        return std::ranges::adjacent_find(containers_) != containers_.end();
    }

    py::list arrays;
    py::list plain;

  private:
    static bool take_items(PyObject* keys, PyObject* value, std::vector<py::object>& items) {
        if (PyList_CheckExact(keys)) {
            const auto count = PyList_GET_SIZE(keys);
            if (PyDict_Size(value) != count) return false;
            items.reserve(static_cast<std::size_t>(count));
            return visit_items(value, [&](PyObject* key, PyObject* item) {
                const auto at = static_cast<py::ssize_t>(items.size());
                if (at >= count || !are_same(PyList_GET_ITEM(keys, at), key)) return false;
                items.push_back(py::reinterpret_borrow<py::object>(item));
                return true;
            });
        }
        const auto count = PySequence_Fast_GET_SIZE(value);
        if (count != PyLong_AsSsize_t(keys)) return false;
        items.reserve(static_cast<std::size_t>(count));
        for (py::ssize_t i = 0; i < count; ++i) {
            items.push_back(py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(value, i)));
        }
        return true;
    }
    static bool has_attributes(PyObject* value, PyObject* wanted) {
        const py::object attributes = stolen(PyObject_GenericGetDict(value, nullptr));
        const int same = PyObject_RichCompareBool(attributes.ptr(), wanted, Py_EQ);
        if (same < 0) throw py::error_already_set();
        return same == 1;
    }

    std::vector<PyObject*> containers_;
    std::vector<py::object> kept_;  // so that no container gets the address of another one
};

bool is_immutable(PyObject* value) {
    return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) ||
           PyFloat_CheckExact(value) || PyUnicode_CheckExact(value) || PyBytes_CheckExact(value) ||
           PyComplex_CheckExact(value);
}

/// One walk through a module, as `state_dict` walks.
class ModuleWalk {
  public:
    explicit ModuleWalk(py::object base) : base_(std::move(base)) {
        for (const py::str& name : methods_) {
            stock_.push_back(base_.attr(name));
            shape.append(stock_.back());
        }
    }

    bool walk(const py::object& module, int depth) {
        if (depth > kDeepest || !is_stock(Py_TYPE(module.ptr()))) return false;
        const py::object own = stolen(PyObject_GenericGetDict(module.ptr(), nullptr));
        for (const py::str& name : hooks_) {
            PyObject* const hooks = find(own, name);
            if (hooks != nullptr && PyObject_Size(hooks) != 0) return false;
        }
        for (const py::str& name : methods_) {
            if (find(own, name) != nullptr) return false;
        }
        shape.append(py::type::handle_of(module));
        shape.append(module.attr(version_));
        PyObject* const parameters = find(own, parameters_);
        PyObject* const buffers = find(own, buffers_);
        PyObject* const left_out = find(own, left_out_);
        PyObject* const modules = find(own, modules_);
        if (parameters == nullptr || buffers == nullptr || left_out == nullptr ||
            modules == nullptr || !PySet_Check(left_out)) {
            return false;
        }
        const auto take = [&](PyObject* name, PyObject* tensor) {
            if (!PyUnicode_CheckExact(name)) return false;
            if (tensor == Py_None) return true;
            shape.append(py::handle(name));
            tensors.append(py::handle(tensor));
            return true;
        };
        if (!visit_items(parameters, take)) return false;
        shape.append(py::none());
        const auto take_buffer = [&](PyObject* name, PyObject* tensor) {
            if (!PyUnicode_CheckExact(name)) return false;
            return PySet_Contains(left_out, name) == 1 || take(name, tensor);
        };
        if (!visit_items(buffers, take_buffer)) return false;
        shape.append(py::none());
        std::vector<std::pair<py::object, py::object>> children;
        const auto take_child = [&](PyObject* name, PyObject* child) {
            if (!PyUnicode_CheckExact(name)) return false;
            if (child != Py_None) {
                children.emplace_back(py::reinterpret_borrow<py::object>(name),
                                      py::reinterpret_borrow<py::object>(child));
            }
            return true;
        };
        if (!visit_items(modules, take_child)) return false;
        for (const auto& [name, child] : children) {
            shape.append(name);
            if (!walk(child, depth + 1)) return false;
        }
        shape.append(py::none());
        return true;
    }

    py::list tensors;
    py::list shape;

  private:
    static PyObject* find(const py::object& dict, const py::str& name) {
        return PyDict_GetItemWithError(dict.ptr(), name.ptr());
    }
    /// Whether a class leaves its state to torch's Module. Classes are cached for this walk.
    bool is_stock(PyTypeObject* type) {
        if (std::ranges::find(known_, type) != known_.end()) return true;
        const auto cls = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
        if (PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(base_.ptr())) == 0) return false;
        for (std::size_t i = 0; i < methods_.size(); ++i) {
            if (cls.attr(methods_[i]).ptr() != stock_[i].ptr()) return false;
        }
        for (const py::str& name : {parameters_, buffers_, left_out_, modules_}) {
            if (py::hasattr(cls, name)) return false;  // it would hide the module's own
        }
        known_.push_back(type);
        return true;
    }

    const py::object base_;
    const std::array<py::str, 4> methods_{py::str("state_dict"), py::str("_save_to_state_dict"),
                                          py::str("get_extra_state"), py::str("__getattribute__")};
    const std::array<py::str, 2> hooks_{py::str("_state_dict_hooks"),
                                        py::str("_state_dict_pre_hooks")};
    const py::str version_{"_version"};
    const py::str parameters_{"_parameters"};
    const py::str buffers_{"_buffers"};
    const py::str left_out_{"_non_persistent_buffers_set"};
    const py::str modules_{"_modules"};
    std::vector<py::object> stock_;
    std::vector<PyTypeObject*> known_;
};

}  // namespace

py::object split(const py::tuple& form, const py::object& value, const py::object& is_plain) {
    Split found;
    if (!found.walk(form.ptr(), value.ptr(), 1) || found.has_container_twice()) return py::none();
    for (const py::handle item : found.plain) {
        if (!is_immutable(item.ptr()) && !is_plain(item).cast<bool>()) return py::none();
    }
    return py::make_tuple(found.arrays, found.plain);
}

py::object module_tensors(const py::object& module, const py::object& base) {
    ModuleWalk found(base);
    if (!found.walk(module, 1)) return py::none();
    return py::make_tuple(found.tensors, found.shape);
}

}  // namespace datastates::python
