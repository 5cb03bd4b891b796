package gateway

import (
	"net/http"
	"strings"
	"time"

	"colibri/client/go/gateway/apikeys"
)

// authorize finds the key of a request and takes its share of the key's limits, until leave is called.
func authorize(keys *apikeys.File, x *exchange) (leave func(), err error) {
	if keys == nil {
		return func() {}, nil
	}
	scheme, secret, _ := strings.Cut(x.r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "bearer") || secret == "" {
		return nil, newError(http.StatusUnauthorized, "missing_api_key", "send an API key: Authorization: Bearer KEY")
	}
	if x.key = keys.Find(secret); x.key == nil {
		return nil, newError(http.StatusUnauthorized, "invalid_api_key", "the API key is not known")
	}
	leave, wait, ok := x.key.Enter(time.Now())
	if !ok {
		e := newError(http.StatusTooManyRequests, "rate_limit_exceeded",
			"the limit of the API key is reached; try again later")
		e.retryAfter = wait
		return nil, e
	}
	return leave, nil
}
