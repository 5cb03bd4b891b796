package gateway

import (
	"errors"
	"fmt"
	"math"

	"colibri/client/go/gateway/strictjson"
)

// fields are the parameters that a request understands: each reads its value into a place of the request.
type fields map[string]func(strictjson.Raw) error

// reader turns a value into a T. Its error goes on after the parameter's name ("must be ..."), unless it is a placed
// one.
type reader[T any] func(strictjson.Raw) (T, error)

// placed is an error at a place inside a parameter: [2].content.
type placed struct {
	path   string
	reason error
}

func (e *placed) Error() string { return e.path + " " + e.reason.Error() }

// inside adds a step to where an error is.
func inside(step string, err error) error {
	var deeper *placed
	if errors.As(err, &deeper) {
		return &placed{step + deeper.path, deeper.reason}
	}
	return &placed{step, err}
}

// bind reads an object's fields. null is as good as absent, as with OpenAI; a name that is not in the table is ignored.
func (f fields) bind(object strictjson.Raw) error {
	for name, value := range object.Fields() {
		read, known := f[name]
		if !known || value.IsNull() {
			continue
		}
		if err := read(value); err != nil {
			return asInvalid(name, err)
		}
	}
	return nil
}

func asInvalid(name string, err error) error {
	var own *apiError
	if errors.As(err, &own) {
		return own
	}
	var deeper *placed
	if errors.As(err, &deeper) {
		name, err = name+deeper.path, deeper.reason
	}
	e := invalid(name, err.Error())
	var missing *unsupportedError
	if errors.As(err, &missing) {
		e.code = "unsupported"
	}
	return e
}

// into reads a value into a place.
func into[T any](place *T, read reader[T]) func(strictjson.Raw) error {
	return func(raw strictjson.Raw) (err error) {
		*place, err = read(raw)
		return err
	}
}

// optional is for a place that knows absence.
func optional[T any](read reader[T]) reader[*T] {
	return func(raw strictjson.Raw) (*T, error) {
		value, err := read(raw)
		return &value, err
	}
}

func str(raw strictjson.Raw) (string, error) {
	value, ok := raw.Text()
	if !ok {
		return "", errors.New("must be a string")
	}
	return value, nil
}

func boolean(raw strictjson.Raw) (bool, error) {
	value, ok := raw.Bool()
	if !ok {
		return false, errors.New("must be true or false")
	}
	return value, nil
}

func whole(low, high uint64) reader[uint64] {
	return func(raw strictjson.Raw) (uint64, error) {
		value, ok := raw.Uint()
		if !ok || value < low || value > high {
			return 0, fmt.Errorf("must be a whole number from %d to %d", low, high)
		}
		return value, nil
	}
}

func signed(low, high int64) reader[int64] {
	return func(raw strictjson.Raw) (int64, error) {
		value, ok := raw.Int()
		if !ok || value < low || value > high {
			return 0, fmt.Errorf("must be a whole number from %d to %d", low, high)
		}
		return value, nil
	}
}

// number is a finite one from low to high.
func number(low, high float64) reader[float64] {
	return func(raw strictjson.Raw) (float64, error) {
		value, ok := raw.Float()
		if !ok || value < low || value > high {
			return 0, fmt.Errorf("must be a number from %v to %v", low, high)
		}
		return value, nil
	}
}

// share is a number above 0, up to high.
func share(high float64) reader[float64] {
	return func(raw strictjson.Raw) (float64, error) {
		value, ok := raw.Float()
		if !ok || value <= 0 || value > high {
			return 0, fmt.Errorf("must be a number above 0, up to %v", high)
		}
		return value, nil
	}
}

// seed is any whole number of 64 bits; OpenAI's are signed, the daemon's are not.
func seed(raw strictjson.Raw) (uint64, error) {
	if value, ok := raw.Uint(); ok {
		return value, nil
	}
	value, ok := raw.Int()
	if !ok {
		return 0, errors.New("must be a whole number of at most 64 bits")
	}
	return uint64(value), nil
}

// list of at most limit entries.
func list[T any](limit int, read reader[T]) reader[[]T] {
	return func(raw strictjson.Raw) ([]T, error) {
		if raw.Kind() != strictjson.Array {
			return nil, errors.New("must be a list")
		}
		var values []T
		for i, item := range raw.Items() {
			if i == limit {
				return nil, fmt.Errorf("has more than %d entries", limit)
			}
			value, err := read(item)
			if err != nil {
				return nil, inside(fmt.Sprintf("[%d]", i), err)
			}
			values = append(values, value)
		}
		return values, nil
	}
}

// token is one id. The daemon knows how many there are.
func token(raw strictjson.Raw) (uint32, error) {
	value, ok := raw.Uint()
	if !ok || value > math.MaxUint32 {
		return 0, errors.New("must be a token id: a whole number, not negative")
	}
	return uint32(value), nil
}

// tokens of a prompt or an output; the body's size bounds them.
func tokens(raw strictjson.Raw) ([]uint32, error) {
	return list(math.MaxInt, token)(raw)
}
